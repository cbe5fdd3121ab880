"""Plans: worked by hand for small pools, then for any pool that every chunk reaches every node along a tree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.p2p.chunks import ContentHashes
from echo2.p2p.identity import Identity
from echo2.p2p.manifest import make_manifest
from echo2.p2p.messages import KIB, BroadcastPlan, Manifest, PeerAddress
from echo2.p2p.plan import (
    HOP_SECONDS,
    STRIPES_MAX,
    LinkRates,
    build_plan,
    choose_plan,
    chunks_on,
    hops,
    predict_seconds,
    source_of,
)

ROOT = PeerAddress(peer=Identity(b"R" * 32).peer_id, addresses=("/ip4/192.0.2.1/tcp/1",))
PEERS = [Identity(number.to_bytes(32, "big")).peer_id for number in range(1, 90)]
HASH = b"h" * 32


def manifest_of(chunks: int) -> Manifest:
    content = ContentHashes(chunks * 64 * KIB, 64 * KIB, bytes(32 * chunks), bytes(32))
    return make_manifest(
        content, run="r", publisher=ROOT.peer, epoch=0, version=0, domain="f16", previous_hash=None, created_seconds=0
    )


def pool(relays: int, leaves: int = 0) -> list[PeerAddress]:
    reachable = [PeerAddress(peer=peer, addresses=("/ip4/192.0.2.2/tcp/1",)) for peer in PEERS[:relays]]
    return reachable + [PeerAddress(peer=peer) for peer in PEERS[relays : relays + leaves]]


def plan_of(kind: str, nodes: list[PeerAddress], chunks: int, rates: LinkRates | None = None) -> BroadcastPlan:
    return build_plan(kind, manifest=manifest_of(chunks), manifest_hash=HASH, root=ROOT, nodes=nodes, rates=rates)


def edges(plan: BroadcastPlan) -> list[list[tuple[str, int, int]]]:
    names = {ROOT.peer: "root"} | {peer: str(number) for number, peer in enumerate(PEERS)}
    return [[(names[edge.source], edge.first, edge.stop) for edge in entry.edges] for entry in plan.entries]


def test_star_by_hand() -> None:
    """In a star every node takes everything from the root; the root and repeats are left out of the roster."""
    plan = plan_of("star", [*pool(2), ROOT, pool(1)[0]], 4)
    assert edges(plan) == [[("root", 0, 4)], [("root", 0, 4)]]


def test_one_ring_by_hand() -> None:
    """Three nodes and three stripes: each takes its own from the root and the other two from its ring neighbour."""
    plan = plan_of("chain", pool(3), 9, LinkRates(root=3.0, uplink=dict.fromkeys(PEERS, 1.0)))
    assert edges(plan) == [
        [("root", 0, 3), ("2", 3, 9)],
        [("0", 0, 3), ("root", 3, 6), ("0", 6, 9)],
        [("1", 0, 6), ("root", 6, 9)],
    ]


def test_chains_and_a_short_last_layer_by_hand() -> None:
    """Two chains, five nodes: own stripe from above, the other round the ring, both when alone in the last layer."""
    plan = plan_of("chain", pool(5), 4, LinkRates(root=2.0, uplink=dict.fromkeys(PEERS, 1.0)))
    assert edges(plan) == [
        [("root", 0, 2), ("1", 2, 4)],
        [("0", 0, 2), ("root", 2, 4)],
        [("0", 0, 2), ("3", 2, 4)],
        [("2", 0, 2), ("1", 2, 4)],
        [("2", 0, 2), ("3", 2, 4)],
    ]
    assert [hops(plan, PEERS[4], chunk) for chunk in (0, 3)] == [3, 3]


def test_leaf_by_hand() -> None:
    """A leaf takes each stripe from the node that has it first, and nobody takes anything from the leaf."""
    plan = plan_of("chain", pool(2, 1), 4, LinkRates(root=2.0, uplink=dict.fromkeys(PEERS, 1.0)))
    assert edges(plan)[2] == [("0", 0, 2), ("1", 2, 4)]


def test_only_leaves() -> None:
    """When nobody can be dialled the chain is a star."""
    assert edges(plan_of("chain", pool(0, 2), 4)) == [[("root", 0, 4)], [("root", 0, 4)]]


rates_of = st.builds(
    LinkRates,
    root=st.none() | st.floats(1e6, 1e9),
    uplink=st.dictionaries(st.sampled_from(PEERS), st.floats(1e5, 1e8)),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["star", "chain", "auto"]), st.integers(0, 40), st.integers(0, 9), st.integers(1, 90), rates_of)
def test_every_chunk_reaches_every_node(kind: str, relays: int, leaves: int, chunks: int, rates: LinkRates) -> None:
    """A node's edges cover each chunk once; following sources ends at the root; leaves and strangers send nothing."""
    nodes = pool(relays, leaves)
    plan = plan_of(kind, nodes, chunks, rates)
    assert {entry.node.peer for entry in plan.entries} == {node.peer for node in nodes}
    senders = {ROOT.peer, *(node.peer for node in nodes if node.addresses)}
    for entry in plan.entries:
        assert len(entry.edges) <= STRIPES_MAX
        assert sorted(chunk for edge in entry.edges for chunk in chunks_on(edge)) == list(range(chunks))
        assert {edge.source for edge in entry.edges} <= senders - {entry.node.peer}
        for chunk in {edge.first for other in plan.entries for edge in other.edges}:
            assert 1 <= hops(plan, entry.node.peer, chunk) <= len(nodes)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), rates_of)
def test_chain_asks_the_root_for_each_chunk_once(relays: int, chunks: int, rates: LinkRates) -> None:
    """In a chain the root sends each chunk once, and a relay sends no chunk to more than two others."""
    plan = plan_of("chain", pool(relays), chunks, rates)
    for chunk in range(chunks):
        sources = [source_of(entry, chunk) for entry in plan.entries]
        assert sources.count(ROOT.peer) == 1
        assert max(sources.count(peer) for peer in sources) <= 2


def test_predictions_by_hand() -> None:
    """10 chunks of 2^19 bits: a star of two over 2^20 bit/s takes 10 s; a chain of two halves the root's load."""
    nodes, manifest = pool(2), manifest_of(10)
    rates = LinkRates(root=2.0**20, uplink=dict.fromkeys(PEERS, 2.0**19), downlink=dict.fromkeys(PEERS, 1e9))
    choice = choose_plan("auto", manifest=manifest, manifest_hash=HASH, root=ROOT, nodes=nodes, rates=rates)
    assert choice.considered["star"] == pytest.approx(10 + HOP_SECONDS)
    # The root sends 10 chunks in 5 s, each node 5 in 5 s; one hop more is one chunk at 1 s.
    assert choice.considered["chain"] == pytest.approx(5 + 1 + 2 * HOP_SECONDS)
    assert choice.plan.kind == "chain"
    assert choice.predicted_seconds == choice.considered["chain"]


def test_auto_prefers_the_star_when_it_is_as_good() -> None:
    """With a learner that has uplink enough for all, or uplinks at the nodes too poor to help, auto is a star."""
    rich = LinkRates(root=1e9)
    poor = LinkRates(root=10e6, uplink=dict.fromkeys(PEERS, 1e5))
    for rates in (rich, poor):
        assert plan_of("auto", pool(3), 64, rates).kind == "star"


def test_no_nodes() -> None:
    """A plan for nobody takes no time."""
    plan = plan_of("auto", [], 4)
    assert plan.entries == ()
    assert predict_seconds(plan, manifest_of(4), LinkRates()) == 0


def test_hops_of_a_plan_with_a_hole() -> None:
    """A peer the plan does not know counts as farther than anybody."""
    assert hops(plan_of("star", pool(3), 4), Identity(b"?" * 32).peer_id, 0) == 4
