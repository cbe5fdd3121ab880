"""Relay, dial back and hole punching among hostile peers: each handler, and each reply that one of ours waits for."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import trio
from fuzz.case import Case, Step
from fuzz.generate import Maker
from fuzz.memory_host import MemoryHost, hello
from fuzz.source import WATCH, Fresh, Recorded, Source, Unserved
from fuzz.stage import CASES_A_CHECK, Replies, attack, no_exception_logged, note_tasks, nothing_left, run_virtual
from multiaddr import Multiaddr

from echo2.p2p.channel import Channel
from echo2.p2p.errors import ProtocolError, Refused, Unreachable
from echo2.p2p.hole_punch import HolePuncher
from echo2.p2p.identity import Identity
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import PeerAddress
from echo2.p2p.reachability import REACHABILITY_PROTOCOL, DialBack, DialBackReply, DialBackRequest, Reachability
from echo2.p2p.relay import Bounds, Relay
from echo2.p2p.relay_client import RelayClient
from echo2.p2p.relay_wire import (
    HOP_PROTOCOL,
    PUNCH_PROTOCOL,
    STOP_PROTOCOL,
    HolePunch,
    HopMessage,
    HopType,
    Limit,
    PunchType,
    Reservation,
    Status,
    StopMessage,
    StopType,
    encode,
    read_message,
)
from echo2.p2p.transport import Stream

NAME = "nat"

WORLD_CASES = {"nat": 4000}

HUB, NODE, BAD_HUB, BAD, RELAYED, STRANGER, FRIEND = (Identity(bytes([0x60 + n]) * 32) for n in range(7))
"""The coordinator; a node behind a NAT; a relay the node has a place at and a coordinator it asks, gone bad; an
admitted node gone bad; a peer that the node is connected with through a relay; somebody; the node's honest friend."""

REQUESTED = {HOP_PROTOCOL, REACHABILITY_PROTOCOL, STOP_PROTOCOL, PUNCH_PROTOCOL}
"""Protocols whose handlers get hostile requests."""

ASKS = {
    "bad": (HOP_PROTOCOL, REACHABILITY_PROTOCOL),
    "stranger": (HOP_PROTOCOL, REACHABILITY_PROTOCOL, STOP_PROTOCOL, PUNCH_PROTOCOL),
    "bad-hub": (STOP_PROTOCOL,),
    "relayed": (PUNCH_PROTOCOL,),
}
"""Role -> what it asks, of the coordinator (the first two protocols) or of the node."""

AT_HUB = frozenset({HOP_PROTOCOL, REACHABILITY_PROTOCOL})

ANSWERING = ("bad-hub-reply", "relayed-reply")

LIMIT = Limit(duration_seconds=60, data_bytes=4096)

LOOK_SECONDS = 0.05
"""Virtual. Between two hostile requests, unless the answer comes sooner."""

ASK_SECONDS, ASK_CALM_SECONDS = 0.5, 20.0
"""Virtual: between the node's own requests, to which the replies are hostile; and while nothing is."""

LEFT_SECONDS = 20.0
"""Virtual: between looks whether all recorded replies were asked for."""


class Stage:
    """A coordinator and a node, as `nat.NatCoordinator` and `nat.NatNode` make them, on hosts in memory."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(random.Random(1))
        self.rng = random.Random(2)
        self.silent: list[Stream] = []
        self.calm = False

    async def play(self, source: Source) -> None:
        network = self.network
        async with trio.open_nursery() as nursery:
            self.transports = {}
            for role, who in {
                "hub": HUB,
                "node": NODE,
                "bad-hub": BAD_HUB,
                "bad": BAD,
                "relayed": RELAYED,
                "stranger": STRANGER,
                "friend": FRIEND,
            }.items():
                self.transports[role] = await nursery.start(_stay, network, who)
            hosts = {
                role: MemoryHost(transport, network, nursery, self.rng) for role, transport in self.transports.items()
            }
            await self.set_up(hosts, nursery)
            Replies("bad-hub-reply", self.transports["bad-hub"], source, self.silent)
            Replies("relayed-reply", self.transports["relayed"], source, self.silent)
            with patch("echo2.p2p.hole_punch.dial_from", hosts["node"].dial_from):
                while True:
                    source.calm = False
                    await self.batch(source)
                    source.calm = True
                    WATCH.begin(None)
                    self.calm = True
                    await nothing_left(network, HUB.peer_id, self.silent)
                    await nothing_left(network, NODE.peer_id, self.silent, seconds=0.0)
                    self.calm = False
                    await self.check()
                    if source.spent:
                        break
            note_tasks(NAME)
            nursery.cancel_scope.cancel()

    async def set_up(self, hosts: dict[str, MemoryHost], nursery: trio.Nursery) -> None:
        """Serve, and have the node keep a place at the bad relay."""
        admitted = {one.peer_id for one in (NODE, BAD, FRIEND, RELAYED)}
        self.hub = hosts["hub"]
        self.relay = Relay(
            self.hub,
            may_use=admitted.__contains__,
            clock=trio.current_time,
            wall=trio.current_time,
            bounds=Bounds(limit=LIMIT, circuits_per_peer=16),
        )
        self.relay.serve()
        self.dial_back = DialBack(self.hub, may_ask=admitted.__contains__, clock=trio.current_time)
        self.dial_back.serve(lambda _peer, _error: None)
        node = self.node = hosts["node"]
        node.relayed.add(RELAYED.peer_id)
        self.reachability = Reachability(node, _at(BAD_HUB), wanted=node.addresses)
        self.puncher = HolePuncher(node, candidates=self.reachability.candidates, clock=trio.current_time)
        self.puncher.serve()
        self.client = RelayClient(node, wall=trio.current_time)
        self.client.serve(met=self.puncher.met)
        await self.serve_bad_hub(hosts["bad-hub"])
        self.transports["relayed"].set_handler(PUNCH_PROTOCOL, self._punched)
        friend = self.friend = RelayClient(hosts["friend"], wall=trio.current_time)
        friend.serve()
        self.caller = RelayClient(hosts["relayed"], wall=trio.current_time)
        nursery.start_soon(self._keep_asking)

    async def serve_bad_hub(self, host: MemoryHost) -> None:
        """What an honest coordinator would answer in its place."""
        honest = Relay(host, may_use=lambda _peer: True, clock=trio.current_time, wall=trio.current_time)
        honest.serve()
        DialBack(host, may_ask=lambda _peer: True, clock=trio.current_time).serve(lambda _peer, _error: None)
        await self.client.reserve(_at(BAD_HUB))

    async def _punched(self, stream: Stream) -> None:
        """The other end of the node's hole punching, as it should be."""
        await read_message(stream, HolePunch)
        await stream.send_all(encode(HolePunch(PunchType.CONNECT, (Multiaddr("/ip4/192.0.2.9/tcp/1").to_bytes(),))))
        await read_message(stream, HolePunch)
        await stream.close_write()

    async def _keep_asking(self) -> None:
        """The node's own requests, which hostile replies answer. What they raise is what they may."""
        target = PeerAddress(
            peer=FRIEND.peer_id, addresses=(f"/ip4/192.0.2.3/tcp/4001/p2p/{BAD_HUB.peer_id}/p2p-circuit",)
        )
        while True:
            for ask in (
                lambda: self.client.reserve(_at(BAD_HUB)),
                lambda: self.client.dial(target),
                self.reachability.check,
                lambda: self.puncher.punch(RELAYED.peer_id),
            ):
                with suppress(Unreachable, ProtocolError, Refused):
                    await ask()
                await trio.sleep(ASK_CALM_SECONDS if self.calm else ASK_SECONDS)

    async def batch(self, source: Source) -> None:
        """Hostile requests, each with an honest one beside it."""
        async with trio.open_nursery() as nursery:
            for _ in range(CASES_A_CHECK):
                step = source.request()
                if step is None:
                    if not isinstance(source, Recorded) or source.spent:
                        break
                    await trio.sleep(LEFT_SECONDS)  # for the replies that are left
                    continue
                done = trio.Event()
                nursery.start_soon(self._attack, step, done)
                with trio.move_on_after(LOOK_SECONDS):
                    await done.wait()
                await self.ask()
            if isinstance(source, Recorded):
                source.drop()
            await trio.sleep(LIMIT.duration_seconds)
            nursery.cancel_scope.cancel()

    async def _attack(self, step: Step, done: trio.Event) -> None:
        target = HUB if step.protocol in AT_HUB else NODE
        await attack(self.transports[step.role], _at(target), step, self.silent)
        done.set()

    async def ask(self) -> None:
        """The honest friend renews its place."""
        try:
            await self.friend.reserve(_at(HUB))
        except Unreachable as error:
            raise Unserved(f"the honest peer gets no place: {error}") from error

    async def check(self) -> None:
        """The friend is met through the relay, dialled back, and the node still takes part itself."""
        await trio.sleep(61.0)  # what is counted by the minute begins anew
        reply = await self._asked(DialBackRequest(ports=(4001,)))
        if reply.ports != (4001,):
            raise Unserved(f"the honest peer is not found: {reply}")
        through = PeerAddress(
            peer=FRIEND.peer_id, addresses=(f"/ip4/192.0.2.3/tcp/4001/p2p/{HUB.peer_id}/p2p-circuit",)
        )
        link = await self.caller.dial(through)
        await link.close()
        if self.relay.view().reservations < 1:
            raise Unserved("the honest peer's place is gone")
        await self.client.reserve(_at(BAD_HUB))

    async def _asked(self, request: DialBackRequest) -> DialBackReply:
        stream = await self.transports["friend"].open(_at(HUB), REACHABILITY_PROTOCOL)
        channel = Channel(stream)
        await channel.send(request, end=True)
        reply = await channel.receive(DialBackReply)
        await channel.receive_end()
        await channel.close()
        return reply


async def _stay(network: MemoryNetwork, who: Identity, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    async with network.transport(who) as transport:
        task_status.started(transport)
        await trio.sleep_forever()


def _at(who: Identity) -> PeerAddress:
    return PeerAddress(peer=who.peer_id, addresses=(f"/memory/{who.peer_id}",))


# What is said.

PEERS = [one.peer_id for one in (HUB, NODE, BAD_HUB, BAD, RELAYED, STRANGER, FRIEND)]

ADDRESSES = [
    Multiaddr(text).to_bytes()
    for text in (
        "/ip4/192.0.2.1/tcp/1",
        "/ip4/198.51.100.2/tcp/65535",
        "/ip4/127.0.0.1/tcp/80",
        "/ip4/224.0.0.1/tcp/1",
        "/ip6/2001:db8::1/tcp/7",
        "/dns/example.org/tcp/1",
        "/ip4/192.0.2.1/udp/1",
    )
]


def _message(rng: random.Random, protocol: str) -> bytes:
    """One of ours, valid but perhaps out of turn."""
    peer = rng.choice([None, *PEERS, *PEERS])
    status = rng.choice([None, Status.OK, Status.OK, *Status])
    limit = rng.choice([None, Limit(), Limit(rng.choice([1, 60, 2**64 - 1]), rng.choice([0, 1, 2**64 - 1]))])
    addresses = tuple(rng.choice([*ADDRESSES, rng.randbytes(rng.randrange(12))]) for _ in range(rng.randrange(9)))
    if protocol == HOP_PROTOCOL:
        kind = rng.choice([HopType.RESERVE, HopType.CONNECT, HopType.CONNECT, HopType.STATUS])
        expires = rng.choice([0, 1, 3600, 2**33, 2**64 - 1])
        return encode(HopMessage(kind, peer, rng.choice([None, Reservation(expires, addresses)]), limit, status))
    if protocol == STOP_PROTOCOL:
        return encode(StopMessage(rng.choice([StopType.CONNECT, StopType.CONNECT, *StopType]), peer, limit, status))
    return encode(HolePunch(rng.choice([PunchType.CONNECT, PunchType.CONNECT, PunchType.SYNC]), addresses))


def _field(rng: random.Random) -> bytes:
    """Any field of protobuf, right or not."""
    key = _varint(rng.choice([0, 1, 2, 3, 4, 5, 6, 100, 2**29]) << 3 | rng.choice([0, 0, 1, 2, 2, 2, 3, 5, 7]))
    inner = rng.randbytes(rng.randrange(20))
    value = [_varint(rng.choice([0, 1, 100, 200, 2**32, 2**64 - 1, 2**70])), _varint(len(inner)) + inner, inner]
    return key + rng.choice(value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _said(rng: random.Random, maker: Maker, protocol: str) -> bytes:
    """Everything said on one stream of a protobuf protocol."""
    how = rng.random()
    data = _message(rng, protocol)
    if how < 0.3:
        tail = rng.choice([b"", hello(rng.choice(PEERS)), rng.randbytes(30), bytes(5000), _message(rng, protocol)])
        return data + tail
    if how < 0.45:
        return maker.mangled(data)
    if how < 0.6:
        body = b"".join(_field(rng) for _ in range(rng.randrange(6)))
        return _varint(len(body)) + body
    if how < 0.7:
        body = data[1:] + _field(rng)
        return _varint(len(body)) + body
    if how < 0.75:
        return rng.choice([b"\xff" * 11, _varint(2**40), _varint(4096) + bytes(4096), _varint(4097) + bytes(4097), b""])
    if protocol == PUNCH_PROTOCOL:
        return data + encode(HolePunch(PunchType.SYNC))
    return data


def _maker(rng: random.Random) -> Maker:
    pools = {"ports": [(), (4001,), (1, 2, 3, 4), (4001, 4001)], "observed": ["/ip4/192.0.2.7/tcp/1", "/ip4/x"]}
    return Maker(rng, pools, lambda _label: BAD, STRANGER)


def _after(rng: random.Random) -> Any:
    return rng.choice(["read"] * 6 + ["reset", "silent"])


def draw_request(rng: random.Random) -> Step:
    """Any request of any of the roles."""
    role = rng.choice(list(ASKS))
    protocol = rng.choice(ASKS[role])
    maker = _maker(rng)
    if protocol == REACHABILITY_PROTOCOL:
        return Step(role, protocol, maker.request(DialBackRequest), _after(rng))
    return Step(role, protocol, _said(rng, maker, protocol), _after(rng))


def draw_reply(rng: random.Random, role: str, protocol: str, honest: bytes) -> Step:
    """The honest reply with an accident, or one made up."""
    maker = _maker(rng)
    if protocol == REACHABILITY_PROTOCOL:
        data = maker.bent(honest) if honest and maker.chance(0.5) else maker.request(DialBackReply)
    else:
        data = maker.mangled(honest) if honest and maker.chance(0.3) else _said(rng, maker, protocol)
    return Step(role, protocol, data, _after(rng))


def _run(source: Source, *, seed: int = 0) -> None:
    with no_exception_logged():
        run_virtual(Stage().play, source, seed=seed)


def soak(_name: str, rng: random.Random, count: int, made: list[Fresh]) -> None:
    """`count` cases against one pair; `made` receives their source."""
    made.append(Fresh(rng, count, request=draw_request, reply=draw_reply))
    _run(made[-1], seed=made[-1].scheduler)


def play(case: Case) -> None:
    """Raise Defect, or whatever ours raised, if it did not bear the case."""
    _run(Recorded(case.steps, asked_for=ANSWERING), seed=case.scheduler)
