"""Which addresses a node may announce, what follows for the broadcast, and what the daemons run."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from unit.p2p.relay_places import ALICE, BOB, BOUND_SECONDS, CAROL, RELAY, echo, exchanged, place

from echo2.coordinator.broadcasts import BroadcastDesk
from echo2.coordinator.lateness import Lateness
from echo2.coordinator.relay_credit import RelayBook
from echo2.p2p import reachability
from echo2.p2p.chunks import ContentHashes
from echo2.p2p.errors import Refused, Unreachable
from echo2.p2p.identity import Identity, open_signed
from echo2.p2p.libp2p_tcp import HostPort
from echo2.p2p.manifest import make_manifest
from echo2.p2p.messages import BroadcastPlan, PeerAddress
from echo2.p2p.nat import NatCoordinator, NatNode
from echo2.p2p.plan import build_plan
from echo2.p2p.reachability import (
    PROVE_SECONDS,
    PROVING_MAX,
    REACHABILITY_PROTOCOL,
    REQUESTS_PER_MINUTE,
    DialBack,
    DialBackRequest,
    Reachability,
    direct_addresses,
    multiaddr_of,
)
from echo2.p2p.relay_client import is_relayed, relayed_address
from echo2.p2p.relay_host import Libp2pHost


def test_where_a_peer_is_seen_is_written_as_it_would_listen():
    """An IPv4 peer of a socket for both kinds counts as IPv4."""
    assert multiaddr_of(HostPort("::ffff:192.0.2.1", 5)) == "/ip4/192.0.2.1/tcp/5"
    assert multiaddr_of(HostPort("2001:db8::1", 5)) == "/ip6/2001:db8::1/tcp/5"


def manifest_of_chunks(count):
    content = ContentHashes(count << 16, 1 << 16, bytes(32 * count), bytes(32))
    named = {"run": "r", "publisher": RELAY.peer_id, "epoch": 0, "version": 0, "domain": "f16"}
    return make_manifest(content, **named, previous_hash=None, created_seconds=0.0)


@asynccontextmanager
async def dialled_back(may_ask=lambda peer: True, wanted=None):
    with trio.fail_after(BOUND_SECONDS):
        async with place(RELAY) as coordinator, place(ALICE) as alice:
            coordinator.dial_back = DialBack(coordinator.host, may_ask=may_ask, clock=trio.current_time)
            coordinator.dial_back.serve(lambda peer, error: None)
            wanted = alice.transport.addresses if wanted is None else wanted
            alice.reachability = Reachability(alice.host, coordinator.address, wanted=wanted)
            yield coordinator, alice


async def test_addresses_that_lead_back_are_announced():
    """Both sides remember the same ones."""
    async with dialled_back() as (coordinator, alice):
        assert alice.reachability.addresses == ()
        view = await alice.reachability.check()
        assert (view.reachable, view.unproved, view.reason) == (True, (), "")
        assert alice.reachability.addresses == alice.transport.addresses == coordinator.dial_back.proved(ALICE.peer_id)


async def test_only_the_asker_is_dialled_back_and_only_where_it_is_seen(monkeypatch):
    """An address of somebody else's is not proved, and nobody but the asker gets a packet."""
    dialled = []
    prove = Libp2pHost.proves

    async def noted(self, peer, remote):
        dialled.append((peer, remote.host))
        await prove(self, peer, remote)

    monkeypatch.setattr(Libp2pHost, "proves", noted)
    async with place(CAROL) as carol:
        theirs = carol.transport.addresses
        async with dialled_back(wanted=("/ip4/198.51.100.7/tcp/4001", *theirs)) as (_coordinator, alice):
            view = await alice.reachability.check()
            assert set(dialled) == {(ALICE.peer_id, "127.0.0.1")}
            assert view.unproved == ("/ip4/198.51.100.7/tcp/4001", *theirs)
            assert view.proved == alice.transport.addresses  # where it listens, though it wanted to say otherwise


async def test_the_outer_port_of_the_listening_port_is_learnt_for_hole_punching_only(monkeypatch):
    """It is seen by dialling from it, stays known while that connection lives, and is never announced."""

    async def swallowed(self, peer, remote):
        raise OSError("no answer")

    monkeypatch.setattr(Libp2pHost, "proves", swallowed)
    async with dialled_back() as (_, alice):
        for _ in range(2):
            view = await alice.reachability.check()
            assert (view.reachable, view.mapped) == (False, alice.transport.addresses[0])
            assert alice.reachability.addresses == ()
            assert alice.reachability.candidates() == alice.transport.addresses
            assert "nothing led here from port" in view.reason


async def test_strangers_are_not_dialled_back_and_nobody_too_often():
    """A refusal leaves what is known as it is, and says why."""
    async with dialled_back(may_ask=lambda peer: False) as (_, alice):
        with pytest.raises(Refused, match="only admitted peers"):
            await alice.reachability.check()
        assert (alice.reachability.view().reachable, alice.reachability.addresses) == (None, ())
    async with dialled_back() as (_coordinator, alice):
        for _ in range(6):
            await alice.reachability.check()
        with pytest.raises(Refused, match="at most 6 dials back a minute"):
            await alice.reachability.check()
        assert alice.reachability.addresses == alice.transport.addresses


@pytest.mark.parametrize("admitted", [False, True])
async def test_silent_requests_of_strangers_get_few_places(monkeypatch, admitted):
    """The oldest go for the newest, and who speaks is still told why it is refused; admitted peers' may wait."""
    monkeypatch.setattr(reachability, "STRANGERS_UNREAD_MAX", 4)
    async with dialled_back(may_ask=lambda peer: admitted) as (coordinator, alice):
        silent = [
            await alice.host.open_raw(coordinator.address, REACHABILITY_PROTOCOL, relayed=False) for _ in range(12)
        ]
        ended = []

        async def wait(stream):
            with suppress(Unreachable):
                await stream.receive_some(1)
            ended.append(stream)

        async with trio.open_nursery() as nursery:
            for one in silent:
                nursery.start_soon(wait, one)
            if admitted:
                await alice.reachability.check()
                assert ended == []
            else:
                with pytest.raises(Refused, match="only admitted peers"):
                    await alice.reachability.check()
                while len(ended) < len(silent) - 4:
                    await trio.lowlevel.checkpoint()
                assert coordinator.dial_back._unread.count <= 4
            nursery.cancel_scope.cancel()


class SilentPorts:
    """A host whose dials back lead nowhere, but for those of honest peers; notes who is dialled when."""

    def __init__(self, honest=()):
        self.honest = honest
        self.dialled = []
        self.now = Counter()
        self.most_of_one = 0

    async def proves(self, peer, _remote):
        self.dialled.append((trio.current_time(), peer))
        self.now[peer] += 1
        self.most_of_one = max(self.most_of_one, self.now[peer])
        try:
            if peer not in self.honest:
                await trio.sleep_forever()
        finally:
            self.now[peer] -= 1


async def test_peers_whose_ports_swallow_every_dial_hold_one_place_each(autojump_clock):
    """An honest peer is dialled at once beside fewer of them than places, and beside more of them after one bound."""
    seen = HostPort("192.0.2.1", 1)
    for silent, seconds in ((PROVING_MAX - 1, 0.0), (2 * PROVING_MAX - 1, PROVE_SECONDS)):
        host = SilentPorts(honest=("honest",))
        back = DialBack(host, may_ask=lambda peer: True, clock=trio.current_time)
        async with trio.open_nursery() as nursery:
            for n in range(silent):
                for _ in range(REQUESTS_PER_MINUTE):
                    nursery.start_soon(back._answer, f"silent-{n}", seen, DialBackRequest(ports=(1, 2, 3, 4)))
            await trio.testing.wait_all_tasks_blocked()
            begun = trio.current_time()
            reply = await back._answer("honest", seen, DialBackRequest(ports=(5,)))
            assert (reply.ports, trio.current_time() - begun) == ((5,), pytest.approx(seconds, abs=0.01))
            assert host.most_of_one == 1
            nursery.cancel_scope.cancel()
        assert back._turns == {}


async def test_news_of_a_peer_is_told_once_and_a_coordinator_that_forgot_is_asked_again():
    """`found` hears of other proofs than before; `check_soon` does not wait for the next check's time."""
    async with dialled_back() as (coordinator, alice):
        news, changes, checks = [], [], []
        coordinator.dial_back = DialBack(
            coordinator.host, may_ask=lambda peer: True, clock=trio.current_time, found=news.append
        )
        coordinator.dial_back.serve(lambda peer, error: None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alice.reachability.keep_checking, lambda: checks.append(1), lambda: changes.append(1))
            for count in (1, 2):
                while len(checks) < count:
                    await trio.lowlevel.checkpoint()
                assert (news, changes) == ([ALICE.peer_id], [1])
                alice.reachability.check_soon()
            nursery.cancel_scope.cancel()


async def test_a_node_that_cannot_be_dialled_announces_nothing_and_can_be_met_at_the_relay():
    """What the daemons run; once it can be dialled it announces, and gives its place up."""
    with trio.fail_after(BOUND_SECONDS):
        async with place(RELAY) as coordinator, place(ALICE) as alice, place(BOB, ()) as bob:
            served = NatCoordinator(
                coordinator.transport, admitted=lambda peer: True, clock=trio.current_time, wall=lambda: 0.0
            )
            nodes = [
                NatNode(one.transport, coordinator.address, clock=trio.current_time, wall=lambda: 0.0)
                for one in (alice, bob)
            ]
            bob.transport.set_handler("hello", echo)
            announced = []
            async with trio.open_nursery() as nursery:
                for name, node in zip("ab", nodes, strict=True):
                    nursery.start_soon(node.run, lambda name=name: announced.append(name))
                while not (nodes[0].addresses and nodes[1].relayed_addresses):
                    await trio.lowlevel.checkpoint()
                assert announced == ["a"]
                assert (nodes[1].addresses, nodes[0].relayed_addresses) == ((), ())
                claimed = (*alice.transport.addresses, "/ip4/198.51.100.7/tcp/1")
                assert served.proved(ALICE.peer_id, claimed) == alice.transport.addresses
                assert served.proved(BOB.peer_id, claimed) == ()
                assert served.view().reservations == 1
                stream = await alice.transport.open(
                    PeerAddress(peer=BOB.peer_id, addresses=nodes[1].relayed_addresses), "hello"
                )
                assert await exchanged(stream, b"there") == b"there"
                while not nodes[1].view().hole_punching:
                    await trio.lowlevel.checkpoint()
                (outcome,) = nodes[1].view().hole_punching
                assert (outcome.result, outcome.tries) == ("not_tried", 0)
                nursery.cancel_scope.cancel()


def test_a_peer_reached_through_a_relay_only_is_a_leaf_of_the_plan():
    """Its addresses do not count as addresses: it is sent chunks and asked for none."""
    manifest = manifest_of_chunks(48)
    direct = "/ip4/192.0.2.1/tcp/4001"
    through = relayed_address(PeerAddress(peer=RELAY.peer_id, addresses=(direct,)))
    said = {ALICE.peer_id: (direct,), BOB.peer_id: through, CAROL.peer_id: ()}
    plan = build_plan(
        "chain", manifest=manifest, manifest_hash=bytes(32),
        root=PeerAddress(peer=RELAY.peer_id, addresses=(direct,)),
        nodes=[PeerAddress(peer=peer, addresses=direct_addresses(known)) for peer, known in said.items()],
    )  # fmt: skip
    assert {edge.source for entry in plan.entries for edge in entry.edges} == {RELAY.peer_id, ALICE.peer_id}
    assert {entry.node.peer for entry in plan.entries} == set(said)
    assert all(not is_relayed(address) for entry in plan.entries for address in entry.node.addresses)


def test_the_coordinator_plans_a_node_that_announces_nothing_as_a_leaf():
    """The signed plan has it receive from those that can be dialled, and nobody ask it."""
    coordinator, direct = Identity(b"c" * 32), ("/ip4/192.0.2.1/tcp/4001",)
    nodes = [
        SimpleNamespace(peer=ALICE.peer_id, addresses=direct, state="active"),
        SimpleNamespace(peer=BOB.peer_id, addresses=(), state="active"),
    ]
    office = SimpleNamespace(
        pool=SimpleNamespace(live=lambda now: nodes),
        clock=lambda: 0.0,
        proved=lambda peer, claimed: claimed,
        config=SimpleNamespace(run=SimpleNamespace(broadcast="chain", learner=RELAY.peer_id)),
        run=SimpleNamespace(learner_addresses=direct, current=None),
        identity=coordinator,
        lateness=Lateness(),
        relays=RelayBook(),
    )
    published = SimpleNamespace(plan=None, manifest=manifest_of_chunks(48), manifest_hash=bytes(32))
    signed = BroadcastDesk(office).plan(published)
    plan = open_signed(signed, coordinator.peer_id, "plan", BroadcastPlan)
    by_peer = {entry.node.peer: entry for entry in plan.entries}
    assert by_peer[BOB.peer_id].node.addresses == ()
    assert {edge.source for edge in by_peer[BOB.peer_id].edges} == {ALICE.peer_id}
    assert BOB.peer_id not in {edge.source for entry in plan.entries for edge in entry.edges}
