"""Who has which part of the newest snapshot: built from memory for people to look at. Nothing here changes anything.

| where a node is | rule                                                                   |
|-----------------|------------------------------------------------------------------------|
| in use          | its heartbeat names the newest manifest                                |
| loading         | every chunk is there, by its own word                                  |
| fetching        | some of them                                                           |
| waiting         | none yet, or it has not said                                           |
| away            | dead, suspended, or away by its own word: nobody waits for it          |

Progress is the node's word. One that does not fit the snapshot (of another, or of another number of cells) is as none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from echo2.p2p import bitmap
from echo2.p2p.chunks import chunks_of
from echo2.p2p.messages import FETCH_CELLS_MAX

from .capacity import installed_quorum
from .views import View

if TYPE_CHECKING:
    from .office import Office
    from .pool import NodeEntry
    from .run_book import Published

NODES_SHOWN = 200
NODES_SHOWN_MAX = 1000
"""Rows of the picture; those that lack it come first."""

Place = Literal["in use", "loading", "fetching", "waiting", "away"]

_ORDER: tuple[Place, ...] = ("fetching", "waiting", "loading", "in use", "away")


class BroadcastNodeView(View):
    """How far one node is with the newest snapshot."""

    peer: str
    name: str
    place: Place
    counted: bool
    """Whether the end of the broadcast waits for it: it is live and does not stand by."""
    cells: str
    """A bitmap in hexadecimal, bit i of byte i // 8 for cell i, lowest first; empty when it has said nothing."""
    chunks_held: int | None
    sources: tuple[str, ...]
    """Who is sending to it now."""
    seconds: float | None
    """From the publication until it was in use; None until then, or when it was before this coordinator started."""
    holds_others_up: bool
    """Others waited for it as a relay: it is planned as a leaf for a while."""
    behind: bool
    """It is counted, lacks the snapshot, and the usual T_bcast is over."""


class BroadcastView(View):
    """The broadcast of the newest snapshot. Everything but `waiting` is None or empty before the first one."""

    run: str
    epoch: int | None = None
    version: int | None = None
    kind: Literal["full", "delta", "adapter"] | None = None
    plan_kind: str = ""
    """Star or chain; empty before a node asked for it."""
    length_bytes: int | None = None
    chunk_bytes: int | None = None
    chunks: int | None = None
    cells: int = 0
    """In each node's picture; one cell is one chunk up to 256 chunks."""
    published_seconds_ago: float | None = None
    """None when it was published before this coordinator started."""
    broadcast_seconds: float | None = None
    """Its T_bcast; None while it is under way."""
    t_bcast_seconds: float | None = None
    """The median of recent ones."""
    counted: int = 0
    in_use: int = 0
    """Of those counted."""
    quorum: int = 0
    """So many of them end the broadcast."""
    waiting: str = ""
    """What the broadcast waits for; empty when it is done."""
    nodes: tuple[BroadcastNodeView, ...] = ()
    nodes_left_out: int = 0


def broadcast_view(office: Office, limit: int = NODES_SHOWN) -> BroadcastView:
    """The newest snapshot of the run and where each node is with it; at most `limit` nodes."""
    current, now = office.run.current, office.clock()
    if current is None:
        return BroadcastView(run=office.run.name, waiting="no snapshot is published yet")
    since = None if current.published_at is None else now - current.published_at
    counted = {node.peer for node in office.pool.working(now)}
    live = {node.peer for node in office.pool.live(now)}
    late = office.lateness.late(now)
    in_use = sum(office.pool.nodes[peer].manifest_hash == current.manifest_hash for peer in counted)
    usual = office.t_bcast()
    overdue = since is not None and usual is not None and since > usual
    rows = [
        _row(node, current, live=node.peer in live, counted=node.peer in counted, late=late, overdue=overdue)
        for node in office.pool.members()
    ]
    rows.sort(key=lambda row: (_ORDER.index(row.place), not row.counted, row.name))
    manifest, chunks = current.manifest, chunks_of(current.manifest)
    quorum = installed_quorum(len(counted)) if counted else 0
    return BroadcastView(
        run=office.run.name,
        epoch=manifest.epoch,
        version=manifest.version,
        kind=manifest.kind,
        plan_kind=current.plan_kind,
        length_bytes=manifest.length_bytes,
        chunk_bytes=manifest.chunk_bytes,
        chunks=chunks,
        cells=min(chunks, FETCH_CELLS_MAX),
        published_seconds_ago=since,
        broadcast_seconds=current.broadcast_seconds,
        t_bcast_seconds=usual,
        counted=len(counted),
        in_use=in_use,
        quorum=quorum,
        waiting=_waiting(current, len(counted), in_use, quorum),
        nodes=tuple(rows[:limit]),
        nodes_left_out=max(0, len(rows) - limit),
    )


def _waiting(current: Published, counted: int, in_use: int, quorum: int) -> str:
    if not counted:
        return "no live node in the pool"
    if current.broadcast_seconds is None and in_use < quorum:
        return f"{quorum - in_use} more nodes to use it ({in_use} of {counted} do, {quorum} are enough)"
    return ""


def _row(
    node: NodeEntry, current: Published, *, live: bool, counted: bool, late: frozenset[str], overdue: bool
) -> BroadcastNodeView:
    chunks = chunks_of(current.manifest)
    cells = min(chunks, FETCH_CELLS_MAX)
    size = -(-cells // 8)
    held: int | None = None
    picture = b""
    sources: tuple[str, ...] = ()
    said = node.fetching
    if node.manifest_hash == current.manifest_hash:
        picture, held = bitmap.below(cells).to_bytes(size, "little"), chunks
    elif said is not None and said.manifest_hash == current.manifest_hash and len(said.cells) == size:
        bits = int.from_bytes(said.cells, "little") & bitmap.below(cells)
        picture, held, sources = bits.to_bytes(size, "little"), min(said.chunks_held, chunks), said.sources
    place = _place(node, current, live=live, held=held, chunks=chunks)
    seconds = None
    if place == "in use" and node.installed_at is not None and current.published_at is not None:
        seconds = max(0.0, node.installed_at - current.published_at)
    return BroadcastNodeView(
        peer=node.peer,
        name=node.name,
        place=place,
        counted=counted,
        cells=picture.hex(),
        chunks_held=held,
        sources=sources if place == "fetching" else (),
        seconds=seconds,
        holds_others_up=node.peer in late,
        behind=overdue and counted and place != "in use",
    )


def _place(node: NodeEntry, current: Published, *, live: bool, held: int | None, chunks: int) -> Place:
    if not live:
        return "away"
    if node.manifest_hash == current.manifest_hash:
        return "in use"
    if not held:
        return "waiting"
    return "loading" if held == chunks else "fetching"
