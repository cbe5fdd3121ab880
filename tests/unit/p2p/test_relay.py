"""The relay: its bounds, whom it serves, and what a hostile peer gets."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from unit.p2p.relay_places import ALICE, BOB, CAROL, PEERS, RELAY, echo, exchanged, hop, relayed

from echo2.p2p.errors import Unreachable
from echo2.p2p.messages import PeerAddress
from echo2.p2p.reachability import direct_addresses
from echo2.p2p.relay import UNREAD_MAX, Bounds, Relay, RelayTable, network_of
from echo2.p2p.relay_client import is_relayed, relay_of, relayed_address
from echo2.p2p.relay_wire import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    HopMessage,
    HopType,
    Limit,
    Status,
    StopMessage,
    StopType,
    encode,
    read_message,
)


def test_places_are_bounded_in_all_and_per_network_and_one_a_peer():
    """Asking again renews; a full table and a full network refuse others."""
    table = RelayTable(Bounds(reservations=3, reservations_per_network=2, reservation_seconds=100))
    assert [table.reserve(peer, "a", 0) for peer in "112"] == [Status.OK] * 3
    assert table.reservations == 2
    assert table.reserve("3", "a", 0) is Status.RESERVATION_REFUSED
    assert table.reserve("3", "b", 0) is Status.OK
    assert table.reserve("4", "c", 0) is Status.RESERVATION_REFUSED
    assert table.reserve("1", "a", 99) is Status.OK
    assert table.reserve("4", "c", 100) is Status.OK
    assert table.holders == ("1", "4")


def test_circuits_are_bounded_per_peer_in_all_and_per_minute():
    """Each bound refuses by itself, and what ends is free again."""
    table = RelayTable(Bounds(circuits=3, circuits_per_peer=2, connects_per_minute=4))
    for peer in "xyz":
        table.reserve(peer, peer, 0)
    assert table.connect("a", "nobody", 0) is Status.NO_RESERVATION
    assert table.connect("a", "x", 0) is Status.OK
    assert table.connect("a", "y", 0) is Status.OK
    assert table.connect("a", "z", 0) is Status.RESOURCE_LIMIT_EXCEEDED  # two of its own
    table.disconnect("a", "y")
    assert table.connect("a", "z", 1) is Status.RESOURCE_LIMIT_EXCEEDED  # four asked within the minute
    assert table.connect("b", "x", 1) is Status.OK
    assert table.connect("c", "x", 1) is Status.RESOURCE_LIMIT_EXCEEDED  # two of the target's
    assert table.connect("c", "y", 1) is Status.OK
    assert table.connect("d", "z", 1) is Status.RESOURCE_LIMIT_EXCEEDED  # three in all
    assert table.circuits == 3
    table.disconnect("c", "y")
    assert table.connect("a", "z", 60) is Status.OK  # a minute later


@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "release", "connect", "disconnect"]), st.sampled_from("abcdefgh"),
                  st.sampled_from("abcdefgh"), st.floats(0, 30)), max_size=60,
    )
)  # fmt: skip
def test_no_order_of_requests_breaks_the_bounds(events):
    """Places and circuits stay within their bounds, and memory with them."""
    bounds = Bounds(reservations=3, reservations_per_network=2, circuits=3, circuits_per_peer=2)
    table, now, running = RelayTable(bounds), 0.0, []
    for event, one, other, seconds in events:
        now += seconds
        if event == "reserve":
            table.reserve(one, one[0] if one < "c" else "net", now)
        elif event == "release":
            table.release(one)
        elif event == "connect" and table.connect(one, other, now) is Status.OK:
            running.append((one, other))
        elif event == "disconnect" and running:
            table.disconnect(*running.pop())
        assert table.reservations <= 3
        assert table.circuits == len(running) <= 3
        for peer in "abcdefgh":
            assert sum(source == peer for source, _ in running) <= 2
            assert sum(target == peer for _, target in running) <= 2


def test_networks():
    """One home's IPv6 network and one /24 count as one asker."""
    assert network_of("192.0.2.7") == network_of("::ffff:192.0.2.200") == "192.0.2.0/24"
    assert network_of("2001:db8:1:2::3") == network_of("2001:db8:1:ffff::1")
    assert network_of("fe80::1%eth0") == "fe80::/48"


def test_addresses_through_a_relay():
    """They are told from direct ones, taken apart, and refused when malformed."""
    relay = PeerAddress(peer=PEERS[0], addresses=("/ip4/192.0.2.1/tcp/4001",))
    (through,) = relayed_address(relay)
    assert is_relayed(through)
    assert relay_of(through) == relay_of(f"{through}/p2p/{PEERS[1]}") == relay
    assert direct_addresses((through, *relay.addresses)) == relay.addresses
    for bad in (
        "/ip4/192.0.2.1/tcp/4001",
        "/p2p-circuit",
        f"/ip4/1.2.3.4/udp/5/p2p/{PEERS[0]}/p2p-circuit",
        "/x/p2p/y/p2p-circuit",
    ):
        with pytest.raises(ValueError):
            relay_of(bad)


async def test_two_peers_talk_through_a_relay_and_know_each_other():
    """The ends prove their keys to each other; the relay counts, and holds nothing when they are done."""
    async with relayed() as (relay, alice, bob):
        await bob.client.reserve(relay.address)
        stream = await alice.transport.open(bob.through, "hello")
        data = bytes(range(256)) * 1000
        assert (stream.peer, await exchanged(stream, data)) == (BOB.peer_id, data)
        assert alice.host.link_of(stream).via == "relay"
        view = relay.relay.view()
        assert (view.reservations, view.circuits, view.circuits_opened) == (1, 1, 1)
        assert view.carried_bytes > 2 * len(data)
        await alice.transport.disconnect(BOB.peer_id)
        while relay.relay.view().circuits:
            await trio.lowlevel.checkpoint()


async def test_megabytes_of_snapshots_are_not_dialled_through_a_relay():
    """`chunks` has no way through a relay."""
    async with relayed() as (relay, alice, bob):
        await bob.client.reserve(relay.address)
        with pytest.raises(Unreachable, match="megabytes are not sent through a relay"):
            await alice.transport.open(bob.through, "chunks")


async def test_only_peers_that_passed_admission_may_reserve_or_connect():
    """Others are refused, with their reason, and take no place."""
    async with relayed(may_use=lambda peer: peer == CAROL.peer_id) as (relay, alice, bob):
        with pytest.raises(Unreachable, match="permission denied"):
            await bob.client.reserve(relay.address)
        answer = await hop(alice, relay, HopMessage(HopType.CONNECT, BOB.peer_id))
        assert answer.status is Status.PERMISSION_DENIED
        assert relay.relay.view().reservations == 0
        assert relay.relay.view().refused == {"permission_denied": 2}


async def test_a_peer_without_a_place_is_not_reached():
    """Being connected is not enough: it must have asked."""
    async with relayed() as (relay, alice, bob):
        await bob.host.connect(relay.address)
        with pytest.raises(Unreachable, match="no reservation"):
            await alice.transport.open(bob.through, "hello")


async def test_a_place_ends_with_the_connection():
    """Nobody is told to wait for a peer that is gone."""
    async with relayed() as (relay, alice, bob):
        await bob.client.reserve(relay.address)
        await bob.transport.disconnect(RELAY.peer_id)
        while relay.host.direct_link(BOB.peer_id):
            await trio.lowlevel.checkpoint()
        answer = await hop(alice, relay, HopMessage(HopType.CONNECT, BOB.peer_id))
        assert answer.status is Status.NO_RESERVATION
        assert relay.relay.view().reservations == 0


async def test_a_circuit_ends_when_its_bytes_are_spent():
    """Both ends see the connection die, and the relay has not carried more than the limit."""
    bounds = Bounds(limit=Limit(duration_seconds=600, data_bytes=50_000))
    async with relayed(bounds) as (relay, alice, bob):
        await bob.client.reserve(relay.address)
        assert bob.client.view()[0].limit == bounds.limit
        stream = await alice.transport.open(bob.through, "hello")
        with pytest.raises((Unreachable, ExceptionGroup)):
            await exchanged(stream, bytes(200_000))
        assert relay.relay.view().carried_bytes <= 50_000
        while relay.relay.view().circuits:
            await trio.lowlevel.checkpoint()


async def test_a_circuit_ends_when_its_time_is_over():
    """However little it carried."""
    async with relayed(Bounds(limit=Limit(duration_seconds=1, data_bytes=0))) as (relay, alice, bob):
        await bob.client.reserve(relay.address)
        stream = await alice.transport.open(bob.through, "hello")
        with pytest.raises(Unreachable):
            await stream.receive_some(1)
        assert relay.relay.view().circuits_opened == 1


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"\x02\xff\xff", Status.MALFORMED_MESSAGE),
        (b"\xff\xff\xff\xff\xff\x01", Status.MALFORMED_MESSAGE),
        (HopMessage(HopType.STATUS, status=Status.OK), Status.UNEXPECTED_MESSAGE),
        (HopMessage(HopType.CONNECT), Status.UNEXPECTED_MESSAGE),
        (HopMessage(HopType.CONNECT, ALICE.peer_id), Status.NO_RESERVATION),
    ],
)
async def test_a_relay_names_what_was_wrong_with_a_request(message, status):
    """And serves the next one."""
    async with relayed() as (relay, alice, _bob):
        assert (await hop(alice, relay, message)).status is status
        assert (await hop(alice, relay, HopMessage(HopType.RESERVE))).status is Status.OK


async def test_silence_takes_no_place_from_who_speaks():
    """Streams on which nothing comes give way to the next, so that their number is bounded."""
    async with relayed() as (relay, alice, bob):
        for _ in range(UNREAD_MAX + 20):
            await alice.host.open_raw(relay.address, HOP_PROTOCOL, relayed=False)
        while relay.relay._unread.evicted < 20:
            await trio.lowlevel.checkpoint()
        assert relay.relay._unread.count <= UNREAD_MAX
        assert (await hop(bob, relay, HopMessage(HopType.RESERVE))).status is Status.OK


async def test_a_relayed_connection_is_no_way_to_a_place():
    """Else one relay would be hidden behind another."""
    async with relayed() as (relay, alice, bob):
        Relay(bob.host, may_use=lambda peer: True, clock=trio.current_time, wall=lambda: 0.0).serve()
        await bob.client.reserve(relay.address)
        link = await alice.client.dial(bob.through)
        stream = await alice.host.open_on(link, HOP_PROTOCOL)
        await stream.send_all(encode(HopMessage(HopType.RESERVE)))
        assert (await read_message(stream, HopMessage)).status is Status.PERMISSION_DENIED


async def test_strangers_cannot_pose_as_our_relay():
    """A peer at which we hold no place brings nobody."""
    async with relayed() as (_relay, alice, bob):
        stream = await alice.host.open_raw(bob.address, STOP_PROTOCOL, relayed=False)
        await stream.send_all(encode(StopMessage(StopType.CONNECT, CAROL.peer_id)))
        assert (await read_message(stream, StopMessage)).status is Status.PERMISSION_DENIED


async def test_a_relay_that_lies_about_who_comes_is_found_out():
    """The key proved end to end counts; the connection is closed."""
    async with relayed() as (relay, _alice, bob):
        await bob.client.reserve(relay.address)
        stream = await relay.host.open_raw(PeerAddress(peer=BOB.peer_id), STOP_PROTOCOL, relayed=False)
        await stream.send_all(encode(StopMessage(StopType.CONNECT, CAROL.peer_id)))
        assert (await read_message(stream, StopMessage)).status is Status.OK
        link = await relay.host.upgrade_outbound(stream, BOB.peer_id, via="relay")
        await relay.host.wait_closed(link)
        assert bob.host.link_of  # still there


async def test_a_place_is_kept_and_taken_again_after_the_connection_was_lost():
    """Without anybody asking."""
    async with relayed() as (relay, alice, bob), trio.open_nursery() as nursery:
        nursery.start_soon(bob.client.keep_place, relay.address)
        while not relay.relay.view().reservations:
            await trio.lowlevel.checkpoint()
        first = bob.host.direct_link(RELAY.peer_id)
        while not first.keep:
            await trio.lowlevel.checkpoint()
        await first.close()
        while bob.host.direct_link(RELAY.peer_id) in (first, None):
            await trio.lowlevel.checkpoint()
        stream = await alice.transport.open(bob.through, "hello")
        assert await exchanged(stream, b"there") == b"there"
        nursery.cancel_scope.cancel()


async def test_bulk_does_not_fall_back_to_a_relayed_connection():
    """With nothing but a relayed connection a request for chunks is Unreachable, and control goes on over it."""
    async with relayed() as (relay, alice, bob):
        await bob.client.reserve(relay.address)
        bob.transport.set_handler("chunks", echo)
        await exchanged(await alice.transport.open(bob.through, "hello"), b"met")
        assert [one.via for one in alice.transport.connections(BOB.peer_id)] == ["relay"]
        with pytest.raises(Unreachable, match="not sent through a relay"):
            await alice.transport.open(bob.through, "chunks")
        for link in alice.transport.connections(BOB.peer_id):
            link.traffic = "bulk"  # as a peer that opens `chunks` on it makes it
        with pytest.raises(Unreachable):
            await alice.transport.open(PeerAddress(peer=BOB.peer_id), "chunks")
