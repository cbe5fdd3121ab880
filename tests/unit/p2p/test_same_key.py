"""Two processes with one key, at the transport: neither takes the other's connection away."""

from __future__ import annotations

import trio

from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import PeerAddress

ANY_PORT = ["/ip4/127.0.0.1/tcp/0"]
SHARED, HOST = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
BOUND_SECONDS = 20.0
ROUNDS = 5


async def echo(stream):
    while data := await stream.receive_some(4096):
        await stream.send_all(data)
    await stream.close_write()


async def ask(here, there, protocol):
    stream = await here.open(there, protocol)
    await stream.send_all(b"x")
    assert await stream.receive_some(1) == b"x"
    await stream.close_write()
    return stream.connection


async def test_both_are_served_on_the_connections_they_made():
    """Requests and chunks of the two, in turn: each keeps its own two connections, none is ended for the other's."""
    with trio.fail_after(BOUND_SECONDS):
        async with (
            open_libp2p_transport(HOST, ANY_PORT) as host,
            open_libp2p_transport(SHARED, []) as first,
            open_libp2p_transport(SHARED, []) as second,
        ):
            for protocol in ("hello", "chunks"):
                host.set_handler(protocol, echo)
            there = PeerAddress(peer=host.peer_id, addresses=host.addresses)
            used = set()
            for _ in range(ROUNDS):
                for here in (first, second):
                    for protocol in ("hello", "chunks"):
                        used.add(await ask(here, there, protocol))
            assert len(used) == 4
            assert all(one.usable for one in used)
            assert len(host.connections(SHARED.peer_id)) == 4
            assert host.view().bans == ()


async def test_a_held_request_of_the_one_outlives_the_coming_of_the_other():
    """The later process does not cut the earlier one off: it is told, in words, by the protocol above."""
    with trio.fail_after(BOUND_SECONDS):
        async with open_libp2p_transport(HOST, ANY_PORT) as host, open_libp2p_transport(SHARED, []) as first:
            host.set_handler("hello", echo)
            there = PeerAddress(peer=host.peer_id, addresses=host.addresses)
            held = await first.open(there, "hello")
            await held.send_all(b"1")
            assert await held.receive_some(1) == b"1"
            for _ in range(ROUNDS):
                async with open_libp2p_transport(SHARED, []) as later:
                    await ask(later, there, "hello")
                await held.send_all(b"2")
                assert await held.receive_some(1) == b"2"
