"""Processes on 127.0.0.1 with a relay among them, for the tests of relaying, hole punching and reachability."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio

from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import DialStrategy, open_libp2p_transport
from echo2.p2p.messages import PeerAddress
from echo2.p2p.relay import Relay
from echo2.p2p.relay_client import RelayClient, relayed_address
from echo2.p2p.relay_host import Libp2pHost
from echo2.p2p.relay_wire import HOP_PROTOCOL, HopMessage, encode, read_message

BOUND_SECONDS = 30.0
RELAY, ALICE, BOB, CAROL = (Identity(bytes([n]) * 32) for n in (1, 2, 3, 4))
PEERS = [one.peer_id for one in (RELAY, ALICE, BOB, CAROL)]


class Place:
    """One process: its transport and what relaying adds to it."""

    def __init__(self, transport):
        self.transport = transport
        self.host = Libp2pHost(transport)
        self.address = PeerAddress(peer=transport.peer_id, addresses=transport.addresses)
        self.client = RelayClient(self.host, wall=lambda: 0.0)
        self.reachability = None


@asynccontextmanager
async def place(identity, listen=("/ip4/127.0.0.1/tcp/0",)):
    async with open_libp2p_transport(identity, listen) as transport:
        yield Place(transport)


@asynccontextmanager
async def relayed(bounds=None, may_use=lambda peer: True, alice_listens=("/ip4/127.0.0.1/tcp/0",)):
    """A relay, Bob with a place at it, Alice who knows Bob's address through it."""
    with trio.fail_after(BOUND_SECONDS):
        async with place(RELAY) as relay, place(BOB) as bob, place(ALICE, alice_listens) as alice:
            relay.relay = Relay(relay.host, may_use=may_use, clock=trio.current_time, wall=lambda: 0.0, bounds=bounds)
            relay.relay.serve()
            bob.client.serve()
            bob.transport.set_handler("hello", echo)
            alice.transport.dial_strategies.append(DialStrategy("relay", alice.client.dial))
            bob.through = PeerAddress(peer=BOB.peer_id, addresses=relayed_address(relay.address))
            yield relay, alice, bob


async def echo(stream):
    while data := await stream.receive_some(65_536):
        await stream.send_all(data)
    await stream.close_write()


async def exchanged(stream, data):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, data)
        back = b""
        while len(back) < len(data):
            part = await stream.receive_some(65_536)
            assert part
            back += part
    await stream.close_write()
    return back


async def hop(place, relay, message):
    """What the relay answers."""
    stream = await place.host.open_raw(relay.address, HOP_PROTOCOL, relayed=False)
    await stream.send_all(message if isinstance(message, bytes) else encode(message))
    return await read_message(stream, HopMessage)
