"""What the owner of the machine sees: one record, written each second, and the table `echo2-node status` prints."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from echo2.p2p.nat_view import NatView
from echo2.p2p.transport_view import TransportView

from .lifecycle import State
from .verdict import standing_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from echo2.p2p.broadcast import FetchProgress

    from .situation import Situation


ENDED = frozenset({"finished", "stopped"})
"""Run states after which no work is given out."""


ENGINE_SHOWN_SECONDS = 10.0
"""A batch takes seconds. One that takes longer is what the owner of the machine waits for."""


class NodeStatus(BaseModel):
    """The state of one node. Counts are of rollouts over the life of the home; `*_submitted` are acknowledged ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer: str
    name: str
    state: str
    command: str
    waiting_for: str
    last_error: str
    last_error_seconds: float | None
    """How long ago it happened."""

    run: str
    run_state: str
    node_state: str
    """The coordinator's verdict on this node, not the node's own belief."""
    node_reason: str = ""
    """Why it is in that state."""
    node_expires_seconds: float | None = None
    """In how many seconds that ends by itself; None: it does not."""
    warmup_returned: int = 0
    """In probation: of its first leases, how many have come back."""
    warmup_leases: int = 0
    warning: str = ""
    """What the coordinator wants the owner to know."""
    epoch: int | None
    version: int | None
    manifest_hash: str
    pool_version: int | None
    """The newest published version, by the coordinator's last signed word."""
    installs: int
    installing: str
    """What is being fetched, in words; empty when nothing is."""

    leases_held: int
    leases_expired: int
    leases_refused: int
    rollouts_generated: int
    rollouts_submitted: int
    evaluations_submitted: int
    spooled: int
    receipts: dict[str, int]
    receipts_waiting: int
    receipts_elsewhere: int
    """Of work that the same key did in another home."""
    price_hour: float = 0.0
    """Dollars that it asks; 0: it is a volunteer's."""
    tokens_per_second: float
    rollouts_per_second: float

    received_bytes: int
    relayed_bytes: int
    protocol_errors: int
    engine_restarts: int
    addresses: tuple[str, ...]
    """Announced to others: at these the coordinator could dial us."""
    network: TransportView | None = None
    """Rates, connections, whom it cannot reach and why; None where the network is simulated."""
    nat: NatView | None = None
    """Whether others can dial this node and why not, its place at the relay, what came of hole punching."""


def installing(progress: FetchProgress | None) -> str:
    """The download going on, in words."""
    if progress is None:
        return ""
    reason = f": {progress.reason}" if progress.reason else ""
    return f"snapshot {progress.version}, {progress.chunks_held} of {progress.chunks} chunks{reason}"


def waiting_for(situation: Situation, *, download: str, idle: bool, line: Callable[[str], str]) -> str:
    """Why nothing is generated just now, in words; empty while work flows. `line`: see `Commands`."""
    counts = situation.counts
    ended = situation.notice is not None and situation.notice.run_state in ENDED
    engine = _engine(situation)
    match situation.state:
        case State.STARTING:
            return "the start of its services"
        case State.JOINING:
            return situation.joining_trouble or "the coordinator's welcome"
        case State.BLOCKED:
            return "; ".join(situation.facts.blocks.values())
        case State.PAUSED:
            return f"`{line('resume')}`"
        case State.FINISHING if not idle:
            return engine or "the batch in hand"
        case State.FINISHING if counts.spooled:
            return f"{counts.spooled} rollouts to be acknowledged"
        case State.FINISHING:
            return f"receipts of {counts.undecided} rollouts"
        case State.WORKING | State.INSTALLING if ended and not situation.leases_held:
            return _over(situation, line("finish"))
        case State.INSTALLING:
            return download or engine or ("the engine" if situation.behind else "the first snapshot to be published")
        case State.WORKING if engine and (not situation.leases_held or situation.engine_seconds > ENGINE_SHOWN_SECONDS):
            return engine
        case State.WORKING if not situation.leases_held:
            return situation.lease_reason or "leases"
        case _:
            return ""


def _engine(situation: Situation) -> str:
    if not situation.engine_job:
        return ""
    return f"the engine: {situation.engine_job} since {situation.engine_seconds:.0f} s"


def _over(situation: Situation, finish: str) -> str:
    assert situation.notice is not None, "the coordinator's word"
    counts = situation.counts
    left = f"{counts.spooled} rollouts to be acknowledged" if counts.spooled else ""
    left = left or (f"receipts of {counts.undecided} rollouts" if counts.undecided else "nothing")
    return f"{left}: the run is {situation.notice.run_state}, there is no more work; `{finish}` ends this node"


def table(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the table, from a status file (which an older or newer version may have written)."""

    def value(name: str) -> str:
        found = status.get(name)
        return "-" if found is None or found == "" else str(found)

    receipts = status.get("receipts") or {}
    elsewhere = int(status.get("receipts_elsewhere") or 0)
    age = float(status.get("last_error_seconds") or 0)
    speed = float(status.get("tokens_per_second") or 0)
    rows = [
        ("node", f"{value('name')}  {value('peer')}"),
        ("state", value("state")),
        ("waiting for", value("waiting_for")),
        ("run", f"{value('run')} ({value('run_state')}); this node: {value('node_state')}"),
        ("standing", _standing(status)),
        ("warning", value("warning")),
        ("version", f"{value('version')} in use, {value('pool_version')} published"),
        ("fetching", value("installing")),
        (
            "generated",
            f"{value('rollouts_generated')} rollouts, {speed:.0f} tokens/s",
        ),
        ("acknowledged", f"{value('rollouts_submitted')} training, {value('evaluations_submitted')} evaluation"),
        ("spooled", value("spooled")),
        ("receipts", ", ".join(f"{count} {state}" for state, count in sorted(receipts.items())) or "-"),
        ("", f"{elsewhere} more, of work that this key did in another home" if elsewhere else "-"),
        ("price", f"${float(status.get('price_hour') or 0):g} an hour" if status.get("price_hour") else "-"),
        ("relayed", f"{int(status.get('relayed_bytes') or 0) / 1e6:.1f} MB"),
        *_nat(status.get("nat") or {}),
        *_network(status.get("network") or {}),
        ("last error", value("last_error") + (f"  ({age:.0f} s before)" if value("last_error") != "-" else "")),
    ]
    return [(name, text) for name, text in rows if text != "-"]


def _standing(status: Mapping[str, Any]) -> str:
    state, left = str(status.get("node_state") or ""), status.get("node_expires_seconds")
    words = standing_words(
        state,
        str(status.get("node_reason") or ""),
        None if left is None else float(left),
        returned=int(status.get("warmup_returned") or 0),
        leases=int(status.get("warmup_leases") or 0),
    )
    if state in {"suspended", "banned"}:
        return f"the coordinator {words}"
    return words or "-"


_MOVED = (("sent_bytes", "sent"), ("received_bytes", "received"))


def _nat(nat: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows about being dialled by others."""
    found = nat.get("reachability") or {}
    rows = []
    if found.get("reachable"):
        rows.append(("reachable", f"yes, at {', '.join(found.get('proved') or ())}"))
    elif found:
        if found.get("reachable") is None:
            rows.append(("reachable", f"not known yet ({found.get('reason')})"))
        else:
            unproved = ", ".join(found.get("unproved") or ())
            told = f"; not told to others: {unproved}" if unproved else ""
            rows.append(("reachable", f"leaf: not reachable from outside ({found.get('reason')}{told})"))
            rows.append(("", "as a leaf it takes snapshots and works like any other node, but passes none on"))
    for place in nat.get("places") or ():
        rows.append(("relay", f"a place at {place.get('relay')}" if place.get("held") else str(place.get("reason"))))
    for one in nat.get("hole_punching") or ():
        result = str(one.get("result")).replace("_", " ")
        rows.append(("hole punching", f"{one.get('peer')}: {result}, {one.get('tries')} tries: {one.get('reason')}"))
    return rows


def _network(network: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows about the line and the peers that cannot be reached."""
    caps = [
        f"{name} at most {float(cap) / 1e6:g} Mbit/s"
        for name, cap in (
            ("up", network.get("upload_bits_per_second_max")),
            ("down", network.get("download_bits_per_second_max")),
        )
        if cap
    ]
    rows = [("line", ", ".join(caps) or "-")]
    connections = Counter(str(each.get("via")) for each in network.get("connections") or ())
    if connections:
        moved = (f"{float(network.get(key) or 0) / 1e6:.1f} MB {word}" for key, word in _MOVED)
        rows.append(("connections", ", ".join((*(f"{n} {via}" for via, n in sorted(connections.items())), *moved))))
    rates = [
        f"{float(network.get(key) or 0) / 1e6:.2f} Mbit/s {way}"
        for key, way in (("sent_bits_per_second", "out"), ("received_bits_per_second", "in"))
        if key in network
    ]
    rows.append(("moving", ", ".join(rates) or "-"))
    for each in network.get("unreachable") or ():
        rows.append(("cannot reach", f"{each.get('peer')}: {each.get('tried')}"))
    for each in network.get("bans") or ():
        rows.append(
            ("refuses", f"{each.get('peer')} for {float(each.get('seconds') or 0):.0f} s: {each.get('reason')}")
        )
    return rows
