"""The largest plan there can be fits every frame it travels in; addresses are few and the best of those there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p import plan as plans
from echo2.p2p.chunks import ContentHashes
from echo2.p2p.codec import encode_frame, encode_record
from echo2.p2p.identity import Identity
from echo2.p2p.manifest import make_manifest
from echo2.p2p.messages import (
    CHUNKS_MAX,
    NODES_MAX,
    BroadcastPlan,
    ManifestReply,
    PeerAddress,
    PublishReply,
    Signed,
    Ticket,
)
from echo2.p2p.plan import ADDRESSES_PLANNED, STRIPES_MAX, LinkRates, best_addresses, build_plan

HASH = b"h" * 32
LONG = "/dns4/" + "x" * 241 + "/tcp/4001"
"""As long as an address may be."""

PEER_IDS = [f"{number:05d}".translate(str.maketrans("0", "z")).rjust(64, "Q") for number in range(NODES_MAX)]
"""As long as a peer id may be."""


def longest(peer, count=16):
    return PeerAddress(peer=peer, addresses=tuple(f"{LONG[:-4]}{port}" for port in range(1000, 1000 + count)))


ROOT = longest("R" * 64)
LARGEST = make_manifest(
    ContentHashes(CHUNKS_MAX * 4096, 4096, bytes(32 * CHUNKS_MAX), bytes(32)),
    run="r" * 64,
    publisher=Identity(b"P" * 32).peer_id,
    epoch=2**53,
    version=2**53,
    domain="f16",
    previous_hash=HASH,
    created_seconds=0,
)


@pytest.mark.parametrize(
    ("kind", "leaves"), [("star", 0), ("chain", 0), ("chain", NODES_MAX // 2), ("chain", NODES_MAX - STRIPES_MAX)]
)
def test_as_many_nodes_as_a_plan_holds_fit_with_their_longest_addresses(kind, leaves, monkeypatch):
    """More addresses than are told, of 256 characters each, any share of leaves, the most stripes: signed, it fits both
    replies, beside the largest manifest."""
    monkeypatch.setattr(plans, "predict_seconds", lambda *_: 0.0)  # takes long for so many, and is not asked here
    nodes = [longest(peer, ADDRESSES_PLANNED + 1) for peer in PEER_IDS[leaves:]] + [
        PeerAddress(peer=peer) for peer in PEER_IDS[:leaves]
    ]
    rates = LinkRates(root=1e9, uplink=dict.fromkeys(PEER_IDS, 1e6))
    made = build_plan(kind, manifest=LARGEST, manifest_hash=HASH, root=ROOT, nodes=nodes, rates=rates)
    assert len(made.entries) == NODES_MAX
    signed = Signed(payload=encode_record(made), signature=bytes(64))
    encode_frame(PublishReply(plan=signed))
    manifest = Signed(payload=encode_record(LARGEST), signature=bytes(64))
    ticket = Signed(payload=encode_record(Ticket(run="r" * 64, manifest_hash=HASH, peer="Q" * 64)), signature=bytes(64))
    encode_frame(ManifestReply(manifest=manifest, plan=signed, ticket=ticket))


def test_leaves_of_a_large_pool_have_few_sources_and_every_chunk_once(monkeypatch):
    """When the edges of a plan are scarce a leaf takes several stripes from one relay; still all of them, in a tree."""
    monkeypatch.setattr(plans, "EDGES_MAX", 45)
    names = [Identity(number.to_bytes(32, "big")).peer_id for number in range(1, 16)]
    nodes = [PeerAddress(peer=peer, addresses=(LONG,)) for peer in names[:5]]
    nodes += [PeerAddress(peer=peer) for peer in names[5:]]
    manifest = LARGEST.model_copy(update={"length_bytes": 40 * 4096, "chunk_sha256": bytes(32 * 40)})
    made = build_plan(
        "chain",
        manifest=manifest,
        manifest_hash=HASH,
        root=ROOT,
        nodes=nodes,
        rates=LinkRates(root=5.0, uplink=dict.fromkeys(names, 1.0)),
    )
    leaves = [entry for entry in made.entries if not entry.node.addresses]
    assert {len(entry.edges) for entry in leaves} == {3}
    relays = set(names[:5])
    for entry in leaves:
        assert {edge.source for edge in entry.edges} <= relays
        assert sorted(chunk for edge in entry.edges for chunk in plans.chunks_on(edge)) == list(range(40))
    assert all(plans.hops(made, entry.node.peer, chunk) <= len(names) for entry in made.entries for chunk in range(40))


@pytest.mark.parametrize(
    ("addresses", "best"),
    [
        ((), ()),
        (("/ip4/10.0.0.1/tcp/1", "/ip4/203.0.114.9/tcp/1"), ("/ip4/203.0.114.9/tcp/1", "/ip4/10.0.0.1/tcp/1")),
        (
            ("/ip4/203.0.114.9/tcp/1", "/ip4/203.0.114.9/tcp/2", "/ip6/2a00::1/tcp/1"),
            ("/ip4/203.0.114.9/tcp/1", "/ip6/2a00::1/tcp/1"),
        ),
        (
            ("/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1", "/dns/node.example.org/tcp/1"),
            ("/dns/node.example.org/tcp/1", "/ip4/192.168.1.2/tcp/1"),
        ),
        (("/memory/x",), ("/memory/x",)),
        (("/ip4/203.0.114.9/tcp/1",) * 3, ("/ip4/203.0.114.9/tcp/1",)),
    ],
)
def test_which_addresses_of_a_node_are_told_to_others(addresses, best):
    """Those of the open internet first, one of each family before a second of one; this machine's own last."""
    assert best_addresses(addresses) == best


@given(st.lists(st.text(min_size=1, max_size=256) | st.sampled_from([LONG, "/ip4/1.2.3.4/tcp/1"]), max_size=16))
def test_addresses_chosen_are_few_and_were_given(addresses):
    """Whatever a peer claims, no more than the bound of it is told, and a node that has addresses keeps one."""
    chosen = best_addresses(addresses)
    assert len(chosen) <= ADDRESSES_PLANNED
    assert set(chosen) <= set(addresses)
    assert bool(chosen) == bool(addresses)


def test_a_plan_keeps_leaves_leaves_and_reachable_nodes_reachable():
    """Choosing addresses changes nobody's part."""
    nodes = [longest(PEER_IDS[0]), PeerAddress(peer=PEER_IDS[1])]
    made = build_plan("chain", manifest=LARGEST, manifest_hash=HASH, root=ROOT, nodes=nodes)
    assert [len(entry.node.addresses) for entry in made.entries] == [ADDRESSES_PLANNED, 0]
    assert isinstance(made, BroadcastPlan)
