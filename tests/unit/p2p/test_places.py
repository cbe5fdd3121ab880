"""Who has to leave a full house, by hand and under arbitrary histories; and that honest peers keep their places."""

from __future__ import annotations

import pytest
import trio
from fuzz.wire import HEADER, SYN, client
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.channel import answering, request
from echo2.p2p.guards import TransportLimits
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress
from echo2.p2p.places import LEAVING_MAX, STRANGER_SECONDS, Places

LIMITS = TransportLimits(inbound_max=8, handshakes_max=3)
BOUND_SECONDS = 30.0
HOST, KEPT, FRESH = (Identity(bytes([n]) * 32) for n in (1, 2, 3))


class House:
    """Places, whose connections end as soon as they are told."""

    def __init__(self, limits=LIMITS, known=()):
        self.places = Places(limits)
        self.known = set(known or ())
        self.places.known = None if known is None else lambda peer: peer in self.known
        self.ended = []
        self.now = 0.0

    def come(self, host, peer=None, *, idle=True):
        """Whether it came in, and settled if it has a name."""
        self.now += 1
        if not self.places.make_room():
            return False
        name = peer or host
        place = self.places.enter(host, self.now, lambda _reason: self.end(place, name))
        if peer is not None:
            self.places.settle(place, peer, self.now, lambda _reason: self.end(place, name), lambda: idle)
        return True

    def end(self, place, name):
        self.ended.append(name)
        self.places.leave(place)


def test_strangers_go_first_from_the_network_with_most():
    """By hand: 8 places, 6 for strangers. Known peers stay, though idle; the crowd's eldest goes, though it is busy."""
    house = House(known={"node", "learner"})
    house.come("203.0.113.1", "node")
    house.come("198.51.100.7", "lonely")
    for n in range(5):
        house.come(f"192.0.2.{n}", f"crowd {n}", idle=False)
    assert house.ended == []
    assert house.come("192.0.2.99", "crowd 5", idle=False)
    assert house.ended == ["crowd 0"]
    assert house.come("203.0.113.2", "learner")
    assert house.come("198.51.100.8", "newcomer")
    assert house.ended == ["crowd 0", "crowd 1"]
    assert house.come("203.0.113.9", "another")
    assert house.ended == ["crowd 0", "crowd 1", "crowd 2"]


def test_a_house_of_known_peers_is_full():
    """None of them goes for another one, and one that is suspended goes first."""
    peers = [f"node {n}" for n in range(8)]
    house = House(known=set(peers))
    assert all(house.come(f"192.0.2.{n}", peer) for n, peer in enumerate(peers))
    assert not house.come("198.51.100.1", "newcomer")
    house.known.remove("node 5")
    house.places.look(house.now)
    assert house.come("198.51.100.1", "newcomer")
    assert house.ended == ["node 5"]


def test_who_has_just_been_admitted_is_not_taken_for_a_stranger():
    """Between two looks as well."""
    house = House(known={"nobody"})
    for n in range(6):
        house.come("192.0.2.1", f"peer {n}")
    house.known.add("peer 0")
    assert house.come("192.0.2.1", "peer 6")
    assert house.ended == ["peer 1"]


def test_strangers_have_a_time():
    """Not admitted by then, it leaves; a handshake has a time of its own."""
    house = House(known={"node"})
    house.come("192.0.2.1", "node")
    house.come("192.0.2.1", "stranger")
    house.come("192.0.2.1")
    house.places.look(house.now + STRANGER_SECONDS - 2)
    assert house.ended == []
    house.places.look(house.now + STRANGER_SECONDS)
    assert house.ended == ["stranger"]


def test_a_crowd_of_handshakes_displaces_itself():
    """Three may go on: the eldest of the network with most of them goes, not the eldest."""
    house = House(known={"node"})
    for host in ("198.51.100.1", "192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"):
        house.come(host)
    assert house.ended == ["192.0.2.1", "192.0.2.2"]


def test_who_tells_nobody_apart_ends_the_idle_first():
    """Then every place may be taken by anyone, and nobody's time is over."""
    house = House(known=None)
    for n in range(7):
        house.come("192.0.2.1", f"busy {n}", idle=False)
    house.come("198.51.100.1", "idle")
    house.places.look(1e9)
    assert house.ended == []
    assert house.come("192.0.2.1", "one more")
    assert house.ended == ["idle"]


def test_connections_that_are_slow_to_end_are_bounded():
    """Room is not made for ever on the word of those that were told to leave."""
    places = Places(TransportLimits(inbound_max=200))
    let_in = 0
    while let_in < 1000 and places.make_room():
        places.settle(places.enter("192.0.2.1", 0.0, lambda _: None), "x", 0.0, lambda _: None, lambda: True)
        let_in += 1
    assert let_in == 200 + LEAVING_MAX


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=60))
def test_no_known_peer_ever_leaves_for_another(moves):
    """Whoever comes from wherever, and there are never more than the bounds say."""
    house = House(known={f"peer {n}" for n in range(3)})
    for network, peer, settles in moves:
        house.come(f"192.0.{network}.1", f"peer {peer}" if settles else None)
        assert len(house.places._places) <= LIMITS.inbound_max
        assert len(house.places.handshakes) <= LIMITS.handshakes_max
    assert not house.known & set(house.ended)


async def hold(_stream):
    await trio.sleep_forever()


async def count_up(_peer, message):
    return Ack(count=message.count + 1)


@pytest.mark.parametrize("how", ["silent stream", "go away"])
async def test_strangers_that_hold_streams_keep_no_honest_peer_out(how):
    """A full house of them, that come again and again: the admitted one keeps its connection, a new one comes in."""
    admitted = {KEPT.peer_id}

    async def hello(peer, message):
        admitted.add(peer)
        return await count_up(peer, message)

    limits = TransportLimits(inbound_max=8, handshakes_max=4)
    with trio.fail_after(BOUND_SECONDS):
        async with (
            open_libp2p_transport(HOST, ["/ip4/127.0.0.1/tcp/0"], limits=limits) as host,
            open_libp2p_transport(KEPT, []) as kept,
            trio.open_nursery() as nursery,
        ):
            host.tell_apart(admitted.__contains__)
            host.set_handler("hello", answering(Ack, hello, lambda peer, error: None))
            host.set_handler("leases", hold)
            there = PeerAddress(peer=HOST.peer_id, addresses=host.addresses)
            await request(kept, there, "hello", Ack(count=1), Ack)
            (connection,) = kept.connections(HOST.peer_id)
            port = int(host.addresses[0].rpartition("/")[2])
            for n in range(3 * limits.inbound_max):
                await nursery.start(hold_a_place, port, Identity(bytes([100 + n]) * 32), how)
            for seed in range(50, 53):
                async with open_libp2p_transport(Identity(bytes([seed]) * 32), []) as fresh:
                    assert (await request(fresh, there, "hello", Ack(count=1), Ack)).count == 2
            assert (await request(kept, there, "hello", Ack(count=1), Ack)).count == 2
            assert kept.connections(HOST.peer_id) == (connection,)
            assert host.view().inbound_connections <= limits.inbound_max
            nursery.cancel_scope.cancel()


async def hold_a_place(port, identity, how, task_status):
    async with client("yamux", port, HOST.peer_id, identity) as hostile:
        await hostile.say(HEADER.pack(0, 1, SYN, 1, 0))
        if how == "go away":
            await hostile.say(HEADER.pack(0, 3, 0, 0, 0))
        task_status.started()
        await trio.sleep_forever()
