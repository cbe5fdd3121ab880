"""The guards of the transport on sockets: who comes in, what an offence costs, which connection carries what."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from echo2.p2p.errors import AnotherPeer, Unreachable
from echo2.p2p.guards import FREE_FAILURES, TransportLimits
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_stream import DATA, HEADER, WINDOW_BYTES_MAX
from echo2.p2p.libp2p_tcp import parse_address
from echo2.p2p.libp2p_transport import DialStrategy, open_libp2p_transport
from echo2.p2p.messages import PeerAddress

ANY_PORT = ["/ip4/127.0.0.1/tcp/0"]
DEAD = ("/ip4/127.0.0.1/tcp/1",)
BOUND_SECONDS = 20.0
ALICE, BOB, CAROL = (Identity(bytes([n]) * 32) for n in (1, 2, 3))


def address_of(transport):
    return PeerAddress(peer=transport.peer_id, addresses=transport.addresses)


async def echo(stream):
    while data := await stream.receive_some(4096):
        await stream.send_all(data)
    await stream.close_write()


async def hold(stream):
    await trio.sleep_forever()


@asynccontextmanager
async def pair(**bob_options):
    """Alice, and Bob under the options."""
    with trio.fail_after(BOUND_SECONDS):
        async with (
            open_libp2p_transport(ALICE, ANY_PORT) as alice,
            open_libp2p_transport(BOB, ANY_PORT, **bob_options) as bob,
        ):
            for each in (alice, bob):
                each.set_handler("hello", echo)
                each.set_handler("chunks", hold)
            yield alice, bob


async def ask(here, there):
    stream = await here.open(there, "hello")
    await stream.send_all(b"x")
    assert await stream.receive_some(1) == b"x"
    await stream.close_write()


async def drain(stream):
    while await stream.receive_some(1024):
        pass


async def send_forever(stream):
    while True:
        await stream.send_all(bytes(50_000))


async def gone(transport, peer):
    for connection in list(transport._connections.get(peer, ())):
        await connection._ended.wait()


def kinds(transport, peer):
    return sorted((one.traffic or "?", one.via) for one in transport._connections.get(peer, ()))


async def break_yamux(here, there):
    """Open a connection and send on it a frame no peer sends."""
    await ask(here, there)
    (connection,) = here._connections[there.peer]
    connection._control.append(HEADER.pack(0, DATA, 0, 1, WINDOW_BYTES_MAX + 1))
    connection._wake()
    await connection._ended.wait()


async def test_control_and_bulk_have_each_their_connection():
    """Requests share one connection and chunks another; both ends know which is which, and use them both ways."""
    async with pair() as (alice, bob):
        for _ in range(2):
            await ask(alice, address_of(bob))
            await alice.open(address_of(bob), "chunks")
        await ask(bob, address_of(alice))
        await bob.open(address_of(alice), "chunks")
        expected = [("bulk", "direct"), ("control", "direct")]
        assert kinds(alice, bob.peer_id) == kinds(bob, alice.peer_id) == expected


async def test_peer_that_cannot_be_dialled_takes_bulk_on_what_there_is():
    """A leaf's own connection carries bulk to it as well: better slow than not at all."""
    async with pair() as (_, bob), open_libp2p_transport(CAROL, []) as leaf:
        leaf.set_handler("chunks", hold)
        await ask(leaf, address_of(bob))
        await bob.open(address_of(leaf), "chunks")
        assert kinds(bob, leaf.peer_id) == [("control", "direct")]


async def test_protocol_errors_cost_a_ban_and_nobody_else():
    """A peer that breaks yamux again is refused, with the reason in the view; others are served; a lift ends it."""
    async with (
        pair(limits=TransportLimits(offences_max=2)) as (alice, bob),
        open_libp2p_transport(CAROL, []) as carol,
    ):
        for _ in range(2):
            await break_yamux(alice, address_of(bob))
            await gone(bob, alice.peer_id)
        with pytest.raises(Unreachable):
            await ask(alice, address_of(bob))
        with pytest.raises(Unreachable, match=r"banned for .* s more: 2 protocol errors"):
            await bob.open(address_of(alice), "hello")
        await ask(carol, address_of(bob))
        (ban,) = bob.view().bans
        assert (ban.peer, "a frame of" in ban.reason) == (alice.peer_id, True)
        bob.lift_ban(alice.peer_id)
        await ask(alice, address_of(bob))


async def test_ban_ends_connections_and_outlives_a_restart(tmp_path):
    """Who is banned loses its connections at once and is refused by the next process too."""
    async with pair(state_dir=tmp_path) as (alice, bob):
        await ask(alice, address_of(bob))
        bob.ban(alice.peer_id, "sends wrong chunks")
        await gone(alice, bob.peer_id)
    async with pair(state_dir=tmp_path) as (alice, bob):
        with pytest.raises(Unreachable):
            await ask(alice, address_of(bob))
        assert bob.view().bans[0].reason == "sends wrong chunks"


async def test_lines_no_peer_sends_are_offences():
    """A protocol line of impossible length costs its stream and counts against the peer."""
    async with pair(limits=TransportLimits(offences_max=1)) as (alice, bob):
        await ask(alice, address_of(bob))
        stream = alice._connections[bob.peer_id][0].open_stream()
        await stream.send_all(b"\xff\xff\xff\xff\x0f" + bytes(100))
        with pytest.raises(Unreachable):
            await drain(stream)
        await gone(alice, bob.peer_id)
        assert "protocol line" in bob.view().bans[0].reason


async def test_only_allowed_peers_come_in():
    """A peer id that is not allowed is refused after its handshake, in both directions."""
    async with (
        pair(allow=lambda peer: peer == CAROL.peer_id) as (alice, bob),
        open_libp2p_transport(CAROL, []) as carol,
    ):
        await ask(carol, address_of(bob))
        with pytest.raises(Unreachable):
            await ask(alice, address_of(bob))
        with pytest.raises(Unreachable, match="not allowed"):
            await ask(bob, address_of(alice))


async def test_back_off_outlives_a_restart(tmp_path):
    """After several failed dials the peer is left alone for a while, by the next process as well; the text says why."""
    absent = PeerAddress(peer=CAROL.peer_id, addresses=DEAD)
    async with open_libp2p_transport(ALICE, [], state_dir=tmp_path, wall=lambda: 1000.0) as alice:
        for _ in range(FREE_FAILURES + 1):
            with pytest.raises(Unreachable, match=r"/tcp/1.*refused"):
                await alice.open(absent, "hello")
        with pytest.raises(Unreachable, match=r"the next try is in .* the last: .*refused"):
            await alice.open(absent, "hello")
        assert "refused" in alice.view().unreachable[0].tried
    async with open_libp2p_transport(ALICE, [], state_dir=tmp_path, wall=lambda: 1000.1) as alice:
        with pytest.raises(Unreachable, match="the next try is in"):
            await alice.open(absent, "hello")
    async with open_libp2p_transport(ALICE, [], state_dir=tmp_path, wall=lambda: 2000.0) as alice:
        with pytest.raises(Unreachable, match=r"cannot reach .*refused"):
            await alice.open(absent, "hello")


async def test_who_comes_to_us_is_dialled_again():
    """A peer that connects itself ends the back-off towards it."""
    async with pair() as (alice, bob):
        for _ in range(FREE_FAILURES + 1):
            with pytest.raises(Unreachable):
                await alice.open(PeerAddress(peer=bob.peer_id, addresses=DEAD), "hello")
        assert alice.view().unreachable
        await ask(bob, address_of(alice))
        assert not alice.view().unreachable


async def test_what_was_tried_is_told():
    """The report names every address and its outcome, also after success."""
    async with pair() as (alice, bob):
        addresses = (*DEAD, "nonsense", *bob.addresses)
        await ask(alice, PeerAddress(peer=bob.peer_id, addresses=addresses))
        report = alice.dial_report(bob.peer_id)
        assert {attempt.address for attempt in report.attempts} == set(addresses)
        assert str(report).startswith(f"reached by {bob.addresses[0]} (")
        assert alice.dial_report(CAROL.peer_id) is None


async def test_names_are_dialled():
    """`/dns4/localhost` leads here."""
    async with pair() as (alice, bob):
        port = parse_address(bob.addresses[0]).port
        await ask(alice, PeerAddress(peer=bob.peer_id, addresses=(f"/dns4/localhost/tcp/{port}",)))


async def test_other_ways_are_tried_after_the_addresses():
    """A strategy that fails is named; the next one connects; a direct connection made later is preferred."""
    async with pair() as (alice, bob):

        async def fails(peer, traffic):
            raise Unreachable("no relay knows it")

        async def through(peer, traffic):
            stream = await trio.open_tcp_stream(*parse_address(bob.addresses[0]))
            return await alice.upgrade_outbound(stream, peer.peer, via="relay")

        alice.dial_strategies += [DialStrategy("first", fails), DialStrategy("second", through)]
        await ask(alice, PeerAddress(peer=bob.peer_id))
        report = str(alice.dial_report(bob.peer_id))
        assert report == "reached by second (first: no relay knows it; second: connected)"
        assert kinds(alice, bob.peer_id) == [("control", "relay")]
        await ask(bob, address_of(alice))  # over the same connection, which Bob takes for direct
        stream = await trio.open_tcp_stream(*parse_address(bob.addresses[0]))
        direct = await alice.upgrade_outbound(stream, bob.peer_id)
        assert alice._pool.best(bob.peer_id, "control") is direct


async def test_connection_inside_a_stream():
    """A stream, as a relay would carry it, is secured and muxed once more and serves like any other connection."""
    async with pair() as (alice, bob):
        bob.set_handler("report", carry := Carry(bob))
        outer = await alice.open(address_of(bob), "report")
        inner = await alice.upgrade_outbound(outer, bob.peer_id, via="relay")
        await carry.ready.wait()
        stream = await alice.open_on(inner, "hello")
        await stream.send_all(b"inside")
        assert await stream.receive_some(100) == b"inside"
        await inner.close()
        await carry.link._ended.wait()


class Carry:
    """A handler that runs a connection over its stream."""

    def __init__(self, transport):
        self.transport = transport
        self.ready = trio.Event()

    async def __call__(self, stream):
        self.link = await self.transport.upgrade_inbound(stream, via="relay")
        self.ready.set()
        await self.link._ended.wait()


async def test_wrong_peer_inside_a_stream_is_unreachable():
    """Whoever is at the end of a carried stream has to prove who it is."""
    async with pair() as (alice, bob):
        bob.set_handler("report", Carry(bob))
        outer = await alice.open(address_of(bob), "report")
        with pytest.raises(AnotherPeer, match=rf"another peer \({bob.peer_id}\) answers here"):
            await alice.upgrade_outbound(outer, CAROL.peer_id, via="relay")


async def test_another_peer_at_an_address_is_named():
    """Who answers there and where, at the first try and while the next one is waited for; other addresses count."""
    async with pair() as (alice, bob):
        port = bob.addresses[0].rpartition("/")[2]
        wanted = PeerAddress(peer=CAROL.peer_id, addresses=bob.addresses[:1])
        said = ""
        while "the next try is in" not in said:
            with pytest.raises(AnotherPeer, match=f"another peer .{bob.peer_id}. answers here") as caught:
                await alice.open(wanted, "hello")
            assert (caught.value.found, caught.value.where) == (bob.peer_id, f"127.0.0.1:{port}")
            said = str(caught.value)
        async with open_libp2p_transport(CAROL, ANY_PORT) as carol:
            carol.set_handler("hello", echo)
            await ask(alice, PeerAddress(peer=CAROL.peer_id, addresses=(*bob.addresses, *carol.addresses)))


async def test_silent_strangers_do_not_hold_places():
    """Beyond the handshakes that may be going on, the oldest silent one goes, and the honest peer comes in."""
    async with pair(limits=TransportLimits(handshakes_max=2)) as (alice, bob):
        where = parse_address(bob.addresses[0])
        silent = [await trio.open_tcp_stream(*where) for _ in range(3)]
        assert await read_to_end(silent[0])
        await ask(alice, address_of(bob))
        for each in silent:
            await each.aclose()


async def read_to_end(stream):
    try:
        while await stream.receive_some(1024):
            pass
    except trio.BrokenResourceError:
        return "reset"
    return "closed"


async def test_handshake_without_end_is_cut_off():
    """A stranger that sends protocol lines for ever, or announces one of gigabytes, is dropped by size, not by time."""
    async with pair() as (_, bob):
        for text in (b"\x13/multistream/1.0.0\n" + b"\x03ls\n" * 30_000, b"\xff\xff\xff\xff\x0f" + bytes(70_000)):
            stranger = await trio.open_tcp_stream(*parse_address(bob.addresses[0]))
            with trio.move_on_after(BOUND_SECONDS / 4) as cut:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send_quietly, stranger, text)
                    assert await read_to_end(stranger)
            assert not cut.cancelled_caught
            await stranger.aclose()


async def send_quietly(stream, text):
    try:
        await stream.send_all(text)
    except trio.BrokenResourceError:
        return


async def test_peer_that_fills_our_memory_loses_its_connection():
    """Unread bytes beyond the cap end the connection they came on; another one is served on."""
    limits = TransportLimits(connection_buffer_bytes_max=100_000)
    async with pair(limits=limits) as (alice, bob), open_libp2p_transport(CAROL, []) as carol:
        await ask(carol, address_of(bob))
        stream = await alice.open(address_of(bob), "chunks")
        with pytest.raises(Unreachable):
            await send_forever(stream)
        await gone(bob, alice.peer_id)
        await ask(carol, address_of(bob))
        assert bob.view().unread_bytes < 100_000


async def test_caps_on_bytes_leave_every_byte_whole():
    """Under caps both ways, what is sent arrives, whichever of the two is the slower."""
    limits = TransportLimits(upload_bits_per_second=40e6, download_bits_per_second=30e6)
    async with pair(limits=limits) as (alice, bob):
        got = []

        async def count(stream):
            total = 0
            while part := await stream.receive_some(1 << 20):
                total += len(part)
            got.append(total)
            await stream.send_all(bytes(total))
            await stream.close_write()

        bob.set_handler("report", count)
        stream = await alice.open(address_of(bob), "report")
        await stream.send_all(bytes(500_000))
        await stream.close_write()
        back = 0
        while part := await stream.receive_some(1 << 20):
            back += len(part)
        assert (got, back) == ([500_000], 500_000)
        view = bob.view()
        assert min(view.sent_bytes, view.received_bytes) > 500_000


async def test_view_can_be_written_down():
    """The view holds the connections with their round trips, and is JSON."""
    async with pair() as (alice, bob):
        await ask(alice, address_of(bob))
        (connection,) = alice.view().connections
        assert (connection.peer, connection.via, connection.traffic) == (bob.peer_id, "direct", "control")
        assert bob.view().inbound_connections == 1
        assert alice.view().model_dump_json()
