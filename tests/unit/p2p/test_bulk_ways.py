"""Where megabytes go: on a connection of their own, paced wherever they go, and through no relay."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from echo2.p2p import libp2p_tcp
from echo2.p2p.errors import Unreachable
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_tcp import parse_address
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.line import Line
from echo2.p2p.messages import PeerAddress

ANY_PORT = ["/ip4/127.0.0.1/tcp/0"]
BOUND_SECONDS = 20.0
HOLDER, LEAF = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
FULL_QUEUE = Line(round_trip_seconds=1.0, shortest_seconds=0.01, delivered_per_second=1e5)


async def echo(stream):
    while data := await stream.receive_some(4096):
        await stream.send_all(data)
    await stream.close_write()


@asynccontextmanager
async def holder_and_leaf():
    """One that can be dialled, and one that only dials out. Both serve both kinds, and note what they served."""
    with trio.fail_after(BOUND_SECONDS):
        async with open_libp2p_transport(HOLDER, ANY_PORT) as holder, open_libp2p_transport(LEAF, []) as leaf:
            served = []
            for each in (holder, leaf):

                async def serve(stream, each=each):
                    served.append((each.peer_id, stream.connection.via))
                    await echo(stream)

                each.set_handler("hello", serve)
                each.set_handler("chunks", serve)
            yield holder, leaf, served


def address_of(transport):
    return PeerAddress(peer=transport.peer_id, addresses=transport.addresses)


async def ask(here, there, protocol):
    return await said_back(await here.open(there, protocol))


async def ask_on(here, connection, protocol):
    return await said_back(await here.open_on(connection, protocol))


async def said_back(stream):
    await stream.send_all(b"x")
    assert await stream.receive_some(1) == b"x"
    await stream.close_write()
    return stream.connection


def kinds(transport, peer):
    return sorted((one.traffic or "?", one.via) for one in transport.connections(peer))


async def test_a_leaf_fetches_on_a_connection_of_its_own_making():
    """It dials the holder a second time for chunks, whichever it asked for first: requests never wait behind them."""
    for order in (("hello", "chunks"), ("chunks", "hello")):
        async with holder_and_leaf() as (holder, leaf, _):
            used = {protocol: await ask(leaf, address_of(holder), protocol) for protocol in order}
            assert used["hello"] is not used["chunks"]
            expected = [("bulk", "direct"), ("control", "direct")]
            assert kinds(leaf, holder.peer_id) == kinds(holder, leaf.peer_id) == expected


async def relayed(holder, leaf):
    """A connection from the leaf to the holder that both take for one through a relay."""
    stream = await trio.open_tcp_stream(*parse_address(holder.addresses[0]))
    link = await leaf.upgrade_outbound(stream, holder.peer_id, via="relay")
    await leaf.open_on(link, "hello")
    while not holder.connections(leaf.peer_id):
        await trio.lowlevel.checkpoint()
    (at_holder,) = holder.connections(leaf.peer_id)
    at_holder.via = "relay"
    return link, at_holder


async def test_chunks_asked_for_through_a_relay_are_not_served():
    """Whoever asks all the same has its stream reset, from either side; a request beside it is answered; no offence."""
    async with holder_and_leaf() as (holder, leaf, served):
        link, at_holder = await relayed(holder, leaf)
        for here, connection in ((leaf, link), (holder, at_holder)):
            served.clear()
            with pytest.raises(Unreachable):
                await ask_on(here, connection, "chunks")
            assert served == []
            await ask_on(here, connection, "hello")
        assert not holder.view().bans
        assert not leaf.view().bans


async def test_chunks_are_not_asked_for_through_a_relay():
    """With nothing but a relayed connection the peer counts as out of reach for them."""
    async with holder_and_leaf() as (holder, leaf, _):
        await relayed(holder, leaf)
        with pytest.raises(Unreachable):
            await leaf.open(PeerAddress(peer=holder.peer_id), "chunks")
        await ask(leaf, PeerAddress(peer=holder.peer_id), "hello")


async def test_chunks_on_a_connection_made_for_requests_are_paced(monkeypatch):
    """Two peers that met by hole punching have but one: chunks on it are slowed down at either end like any others."""
    paces = {}
    monkeypatch.setattr(libp2p_tcp, "read_line", lambda _: FULL_QUEUE)
    monkeypatch.setattr(libp2p_tcp, "set_pace", lambda socket, pace: paces.__setitem__(socket.getsockname(), pace))
    async with holder_and_leaf() as (holder, leaf, _):
        control = await ask(leaf, address_of(holder), "hello")
        await pour_over(control, leaf, "hello", 5)
        assert not paces
        leafs = PeerAddress(peer=leaf.peer_id)
        stream = await holder.open(leafs, "chunks")
        assert kinds(holder, leaf.peer_id) == [("control", "direct")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour, stream)
            nursery.start_soon(drain, stream)
            while len(paces) < 2:  # noqa: ASYNC110 - the holder sends, and what comes back is sent by the leaf
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert all(paces.values())


async def pour(stream):
    while True:
        await stream.send_all(bytes(200_000))


async def drain(stream):
    while await stream.receive_some(1 << 20):
        pass


async def pour_over(connection, transport, protocol, looks):
    """Send for as long as the transport looks at its lines so often."""
    stream = await transport.open_on(connection, protocol)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pour, stream)
        nursery.start_soon(drain, stream)
        for _ in range(looks):
            connection.mind_the_queue()
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    await stream.reset()
