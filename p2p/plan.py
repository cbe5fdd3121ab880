"""Broadcast plans: who sends which chunks to whom. Pure; the coordinator computes and signs, nodes execute.

| plan  | root sends               | a node gets                               | a node sends                    |
|-------|--------------------------|-------------------------------------------|---------------------------------|
| star  | everything to every node | everything from the root                  | nothing                         |
| chain | each chunk once          | its own stripe from the node above in its | its stripe to the node below,   |
|       |                          | chain, the others from its ring neighbour | the others round the ring       |

Chain is the paper's striped design (section 4.2): N = B0 / B_w stripes of contiguous chunks, stripe j streamed at B_w
to the first node of chain j and relayed down the chain, store-and-forward with fan-out 1. So every node of a layer
(same depth, one of each chain) holds another stripe, and the missing ones go round a ring of the layer. A last layer
with fewer than N nodes shares the N stripes out in contiguous runs. Nodes without addresses are leaves: nobody can dial
them, so they relay nothing, and take each stripe from a node that is among the first to hold it.

For every chunk the edges form a tree rooted at the root: this is what makes waiting for one's source safe.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from .chunks import chunks_of
from .messages import NODES_MAX, BroadcastPlan, PeerAddress, PlanEdge, PlanEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .messages import Manifest

Kind = Literal["star", "chain"]
KINDS: tuple[Kind, ...] = ("star", "chain")

STRIPES_MAX = 64
"""Bounds the edges of a leaf (one a stripe) far below what a plan entry may hold, and the length of a ring."""

ADDRESSES_PLANNED = 2
"""Addresses of one node that others are told: an IPv4 one and an IPv6 one. With `EDGES_MAX` it bounds an entry to 960
bytes on average, so that NODES_MAX of them, signed, fit a reply of 16 MiB."""

EDGES_MAX = 3 * NODES_MAX
"""Edges of one plan. Relays have three at most; what is left is shared out among the leaves, which in a small pool take
each stripe from another relay, and in the largest all of them from three."""

ROOT_BITS_PER_SECOND = 100e6
"""Uplink assumed of a learner nobody has measured: a rented machine's usual minimum."""

UPLINK_BITS_PER_SECOND = 20e6
"""Uplink assumed of an unmeasured node: a common home connection."""

DOWNLINK_BITS_PER_SECOND = 100e6
"""Downlink assumed of an unmeasured node: the paper's B_w."""

HOP_SECONDS = 0.05
"""Latency of one relay hop beyond the chunk itself: half a round trip between homes, and the store's write."""

CHAIN_GAIN = 1.1
"""Chain is chosen only when predicted this much faster: it leans on strangers' uplinks, the star on none."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Measured rates in bits per second; whoever is missing gets the default above. Keys are peer ids."""

    root: float | None = None
    uplink: Mapping[str, float] = field(default_factory=dict)
    downlink: Mapping[str, float] = field(default_factory=dict)

    def root_up(self) -> float:
        """B0."""
        return self.root or ROOT_BITS_PER_SECOND

    def up(self, peer: str) -> float:
        """u_i."""
        return self.uplink.get(peer) or UPLINK_BITS_PER_SECOND

    def down(self, peer: str) -> float:
        """d_i."""
        return self.downlink.get(peer) or DOWNLINK_BITS_PER_SECOND


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan, the seconds it is predicted to take, and the prediction for each kind that was weighed."""

    plan: BroadcastPlan
    predicted_seconds: float
    considered: Mapping[Kind, float]


def build_plan(
    kind: Literal["auto", "star", "chain"],
    *,
    manifest: Manifest,
    manifest_hash: bytes,
    root: PeerAddress,
    nodes: Sequence[PeerAddress],
    rates: LinkRates | None = None,
) -> BroadcastPlan:
    """The plan alone; see `choose_plan`."""
    return choose_plan(kind, manifest=manifest, manifest_hash=manifest_hash, root=root, nodes=nodes, rates=rates).plan


def choose_plan(
    kind: Literal["auto", "star", "chain"],
    *,
    manifest: Manifest,
    manifest_hash: bytes,
    root: PeerAddress,
    nodes: Sequence[PeerAddress],
    rates: LinkRates | None = None,
) -> PlanChoice:
    """Plan the broadcast of one snapshot from `root` to `nodes`; `auto` takes the kind with the lower prediction.

    The root and repeated peers among `nodes` are left out. Nodes with the faster uplinks are put nearer the root. Of
    each node's addresses the `best_addresses` are told. At most NODES_MAX nodes: whoever is left out asks the root.
    """
    rates = rates or LinkRates()
    roster = [
        PeerAddress(peer=node.peer, addresses=best_addresses(node.addresses))
        for node in {node.peer: node for node in nodes if node.peer != root.peer}.values()
    ]
    chunks = chunks_of(manifest)

    def made(which: Kind) -> BroadcastPlan:
        entries = _star(roster, root, chunks) if which == "star" else _chain(roster, root, chunks, rates)
        return BroadcastPlan(
            run=manifest.run,
            manifest_hash=manifest_hash,
            epoch=manifest.epoch,
            version=manifest.version,
            chunks=chunks,
            kind=which,
            root=root,
            entries=tuple(entries),
        )

    plans = {which: made(which) for which in (KINDS if kind == "auto" else (kind,))}
    seconds = {which: predict_seconds(plan, manifest, rates) for which, plan in plans.items()}
    chosen: Kind = "star" if kind == "auto" else kind
    if kind == "auto" and seconds["chain"] * CHAIN_GAIN < seconds["star"]:
        chosen = "chain"
    return PlanChoice(plans[chosen], seconds[chosen], seconds)


def best_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """At most ADDRESSES_PLANNED: those of the open internet first, one of each family before a second of any."""
    ranked = sorted(dict.fromkeys(addresses), key=_rank)
    first = {_kind(address): address for address in reversed(ranked)}
    ranked.sort(key=lambda address: first[_kind(address)] != address)
    return tuple(ranked[:ADDRESSES_PLANNED])


def _kind(address: str) -> str:
    return address.removeprefix("/").partition("/")[0]


def _rank(address: str) -> int:
    """0: anyone can dial it; 1: whoever finds the name, or it is of no kind known here; 2: a home; 3: one machine."""
    try:
        found = ipaddress.ip_address("".join(address.split("/")[2:3]))
    except ValueError:
        return 1
    return 0 if found.is_global else 3 if found.is_loopback else 2


def chunks_on(edge: PlanEdge) -> range:
    """The chunks that travel one edge."""
    return range(edge.first, edge.stop, edge.stride)


def source_of(entry: PlanEntry, chunk: int) -> str | None:
    """Who sends `chunk` to this node; None when the entry does not cover it."""
    return next((edge.source for edge in entry.edges if chunk in chunks_on(edge)), None)


def hops(plan: BroadcastPlan, peer: str, chunk: int) -> int:
    """How many sends `chunk` needs from the root until `peer` has it; a cycle or a gap counts as the whole roster."""
    by_peer = {entry.node.peer: entry for entry in plan.entries}
    for count in range(len(plan.entries) + 1):
        if peer == plan.root.peer:
            return count
        entry = by_peer.get(peer)
        above = source_of(entry, chunk) if entry else None
        if above is None:
            break
        peer = above
    return len(plan.entries) + 1


def predict_seconds(plan: BroadcastPlan, manifest: Manifest, rates: LinkRates) -> float:
    """When the last node has the last chunk: the busiest link at its rate, then one chunk down the longest path.

    Every link is full duplex and kept busy once the pipeline is filled; who sends to several shares its uplink.
    """
    if not plan.entries:
        return 0.0
    sent: dict[str, int] = {}
    for entry in plan.entries:
        for edge in entry.edges:
            sent[edge.source] = sent.get(edge.source, 0) + len(chunks_on(edge))
    chunk_bits = 8 * min(manifest.chunk_bytes, manifest.length_bytes)
    root_seconds = sent.get(plan.root.peer, 0) * chunk_bits / rates.root_up()
    up = max((count * chunk_bits / rates.up(peer) for peer, count in sent.items() if peer != plan.root.peer), default=0)
    down = max(8 * manifest.length_bytes / rates.down(entry.node.peer) for entry in plan.entries)
    deepest = _deepest(plan)
    slowest_hop = max((chunk_bits / rates.up(peer) for peer in sent if peer != plan.root.peer), default=0.0)
    return max(root_seconds, up, down) + HOP_SECONDS + (deepest - 1) * (slowest_hop + HOP_SECONDS)


def _star(roster: Sequence[PeerAddress], root: PeerAddress, chunks: int) -> list[PlanEntry]:
    edge = PlanEdge(source=root.peer, first=0, stop=chunks)
    return [PlanEntry(node=node, edges=(edge,)) for node in roster]


def _chain(roster: Sequence[PeerAddress], root: PeerAddress, chunks: int, rates: LinkRates) -> list[PlanEntry]:
    relays = sorted((node for node in roster if node.addresses), key=lambda node: -rates.up(node.peer))
    leaves = [node for node in roster if not node.addresses]
    if not relays:
        return _star(leaves, root, chunks)
    stripes = _stripe_bounds(relays, chunks, rates)
    entries: list[PlanEntry] = []
    owners_by_layer: list[list[str]] = []
    above = [root.peer] * len(stripes)
    for start in range(0, len(relays), len(stripes)):
        layer = relays[start : start + len(stripes)]
        owners: list[str] = []
        for place, node in enumerate(layer):
            own = range(place * len(stripes) // len(layer), (place + 1) * len(stripes) // len(layer))
            owners += [node.peer] * len(own)
            edges = [_edge(above[j], stripes[j], stripes[j]) for j in own]
            before = layer[place - 1].peer  # the ring: the first node of the layer takes from the last
            if own.start > 0:
                edges.append(_edge(before, stripes[0], stripes[own.start - 1]))
            if own.stop < len(stripes):
                edges.append(_edge(before, stripes[own.stop], stripes[-1]))
            entries.append(PlanEntry(node=node, edges=_merged(edges)))
        owners_by_layer.append(owners)
        above = owners
    sources = max(1, min(len(stripes), EDGES_MAX // len(roster)))
    runs = [(part * len(stripes) // sources, (part + 1) * len(stripes) // sources) for part in range(sources)]
    for number, leaf in enumerate(leaves):
        owners = owners_by_layer[number % len(owners_by_layer)]  # each gets the stripes it has not first by the ring
        edges = [_edge(owners[first], stripes[first], stripes[stop - 1]) for first, stop in runs]
        entries.append(PlanEntry(node=leaf, edges=_merged(edges)))
    return entries


def _stripe_bounds(relays: Sequence[PeerAddress], chunks: int, rates: LinkRates) -> list[tuple[int, int]]:
    """N = B0 / B_w contiguous stripes, B_w the median node's uplink: what a chain can carry on."""
    uplinks = sorted(rates.up(node.peer) for node in relays)
    wanted = round(rates.root_up() / uplinks[len(uplinks) // 2])
    count = max(1, min(wanted, len(relays), chunks, STRIPES_MAX))
    return list(pairwise(j * chunks // count for j in range(count + 1)))


def _edge(source: str, first: tuple[int, int], last: tuple[int, int]) -> PlanEdge:
    return PlanEdge(source=source, first=first[0], stop=last[1])


def _merged(edges: Sequence[PlanEdge]) -> tuple[PlanEdge, ...]:
    """Neighbouring runs from one source become one edge: fewer to sign, send and follow."""
    merged: list[PlanEdge] = []
    for edge in sorted(edges, key=lambda edge: edge.first):
        if merged and merged[-1].source == edge.source and merged[-1].stop == edge.first:
            merged[-1] = PlanEdge(source=edge.source, first=merged[-1].first, stop=edge.stop)
        else:
            merged.append(edge)
    return tuple(merged)


def _deepest(plan: BroadcastPlan) -> int:
    """Most sends any chunk needs to reach any node. Walks runs of chunks with equal sources, not single chunks."""
    starts = sorted({edge.first for entry in plan.entries for edge in entry.edges})
    return max(_depths(plan, starts), default=0)


def _depths(plan: BroadcastPlan, starts: Sequence[int]) -> Iterator[int]:
    by_peer = {entry.node.peer: entry for entry in plan.entries}
    for chunk in starts:
        depth = {plan.root.peer: 0}
        for entry in plan.entries:
            path: list[str] = []
            peer: str | None = entry.node.peer
            while peer is not None and peer not in depth:
                path.append(peer)
                peer = source_of(by_peer[peer], chunk)
            base = depth[peer] if peer is not None else 0
            for distance, passed in enumerate(reversed(path), 1):
                depth[passed] = base + distance
            yield depth[entry.node.peer]
