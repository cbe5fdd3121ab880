"""Raw bytes at every layer again (`wire_stage`), here over pipes in memory and under a virtual clock.

The bytes, the handshakes and all of our transport above the socket are the real ones; so many more cases are played,
and time-outs cost nothing. Sockets themselves and the admission of strangers are left to `wire_stage`.
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import patch

import trio
import trio.testing
from fuzz.case import Case, Step
from fuzz.source import WATCH, Fresh, LeftBehind, Recorded, Source, Unserved
from fuzz.stage import CASES_A_CHECK, no_exception_logged, note_tasks, run_virtual
from fuzz.wire import HEADER, Client, Tcp, climb, line
from fuzz.wire_bytes import draw
from fuzz.wire_target import LIMITS, TARGET, serve

from echo2.p2p.channel import request
from echo2.p2p.errors import Unreachable
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import Libp2pTransport, open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress

NAME = "mux"

WORLD_CASES = {"mux": 4000}

HONEST = Identity(b"\x31" * 32)

BAD = [Identity(bytes([n]) * 32) for n in range(0x41, 0x45)]

CASES_A_CONNECTION = 25
"""Hostile streams, or runs of frames, on one connection before the next one is made; it may well end sooner."""

LOOK_SECONDS = 0.01
"""Virtual: everything that is at once is done by then."""

QUIET_SECONDS = 200.0
"""Virtual: a handshake's bound, a dead link's, a message's; whatever is hostile has ended by then."""

MUXED = frozenset({"yamux", "stream", "protocol"})


class Hostile:
    """One connection past the handshakes, kept for several cases."""

    def __init__(self, hostile: Client, nursery: trio.Nursery) -> None:
        self.alive = True
        self.uses = 0
        self._client = hostile
        self._next = 1
        nursery.start_soon(self._drain)

    async def frames(self, data: bytes) -> None:
        """Any bytes where yamux frames are expected."""
        self.uses += 1
        for start in range(0, len(data), 60_000):
            await self._client.say(data[start : start + 60_000])

    async def stream(self, data: bytes, after: str) -> None:
        """Any bytes on a new stream."""
        number, self._next = self._next, self._next + 2
        frames = HEADER.pack(0, 1, 1, number, 0) + HEADER.pack(0, 0, 0, number, len(data)) + data
        if after != "silent":
            frames += HEADER.pack(0, 1, 4 if after == "read" else 8, number, 0)
        await self.frames(frames)

    async def _drain(self) -> None:
        """Read what comes and give room for more."""
        try:
            while True:
                await self._client.hear()
        except Exception:  # noqa: BLE001 - being thrown out, in whatever way, is what a hostile client may expect
            self.alive = False

    async def close(self) -> None:
        """Hang up."""
        self.alive = False
        await trio.aclose_forcefully(self._client.tcp.stream)


class Stage:
    """A transport of ours, with an honest peer's connection as old as itself."""

    def __init__(self) -> None:
        self.rng = random.Random(3)
        self.connections: dict[str, Hostile] = {}
        self.pipes: deque[Any] = deque()

    async def play(self, source: Source) -> None:
        async with AsyncExitStack() as stack:
            # The kernel's queues are looked at many times a second; there is no kernel here, and time costs nothing.
            stack.enter_context(patch("echo2.p2p.libp2p_transport.LOOK_SECONDS", 10.0))
            target = self.target = await stack.enter_async_context(open_libp2p_transport(TARGET, [], limits=LIMITS))
            honest = self.honest = await stack.enter_async_context(open_libp2p_transport(HONEST, []))
            serve(target)
            await self.meet(honest, target)
            while True:
                async with trio.open_nursery() as nursery:
                    for _ in range(CASES_A_CHECK):
                        step = source.request()
                        if step is None:
                            break
                        try:
                            await self.hit(step, nursery)
                        except Exception:  # noqa: BLE001 - being refused is what a hostile client may expect
                            self.connections.pop(step.role, None)
                        await self.ask()
                    WATCH.begin(None)
                    await self.nothing_left()
                    nursery.cancel_scope.cancel()
                if source.spent:
                    break
            note_tasks(NAME)

    async def meet(self, honest: Libp2pTransport, target: Libp2pTransport) -> None:
        """Connect the honest peer."""
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(target.upgrade_inbound, ours)
            nursery.start_soon(honest.upgrade_outbound, theirs, TARGET.peer_id)

    async def ask(self) -> None:
        """The honest peer's request, on its old connection."""
        with trio.move_on_after(5.0):
            peer = PeerAddress(peer=TARGET.peer_id)
            if (await request(self.honest, peer, "hello", Ack(count=41), Ack)).count != 42:
                raise Unserved("the honest peer got a wrong answer")
            return
        raise Unserved("the honest peer gets no answer")

    async def hit(self, step: Step, nursery: trio.Nursery) -> None:
        """One connection below the muxer, or one stream, or one run of frames, above."""
        if step.role not in MUXED:
            hostile = await self._dial(step.role, nursery)
            await hostile.send(step.data)
            if step.after == "read":
                await hostile.tcp.stream.send_eof()
            await trio.sleep(LOOK_SECONDS)
            if step.after != "silent":
                await trio.aclose_forcefully(hostile.tcp.stream)
            return
        kind = "yamux" if step.role == "yamux" else "stream"
        known = self.connections.get(kind)
        if known is None or not known.alive or known.uses >= CASES_A_CONNECTION:
            if known is not None:
                await known.close()
            known = self.connections[kind] = Hostile(await self._dial("yamux", nursery), nursery)
        with trio.move_on_after(QUIET_SECONDS):
            if kind == "yamux":
                await known.frames(step.data)
            elif step.role == "stream":
                await known.stream(step.data, step.after)
            else:
                asked = line("/multistream/1.0.0") + line(f"/echo2/{step.protocol or 'hello'}/1")
                await known.stream(asked + step.data, step.after)
        await trio.sleep(LOOK_SECONDS)

    async def _dial(self, level: Any, nursery: trio.Nursery) -> Client:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(self._accept, ours)
        self.pipes.append(theirs)
        hostile: Client = await climb(level, Tcp(theirs), TARGET.peer_id, self.rng.choice(BAD))
        return hostile

    async def _accept(self, stream: Any) -> None:
        try:
            await self.target.upgrade_inbound(stream)
        except Unreachable:
            return

    async def nothing_left(self) -> None:
        """Hostile connections that go on reading are hung up; all others have ended by themselves."""
        await trio.sleep(QUIET_SECONDS)
        for hostile in self.connections.values():
            await hostile.close()
        self.connections.clear()
        await trio.sleep(LOOK_SECONDS)
        left = [one.peer for one in self.target.view().connections if one.peer != HONEST.peer_id]
        if left:
            raise LeftBehind(f"{len(left)} hostile connections live on in silence")
        if self.target._serving:
            raise LeftBehind(f"{self.target._serving} streams are served for ever")
        self.pipes.clear()


def _run(source: Source, *, seed: int = 0) -> None:
    with no_exception_logged():
        run_virtual(Stage().play, source, seed=seed)


def soak(_name: str, rng: random.Random, count: int, made: list[Fresh]) -> None:
    """`count` cases against one transport; `made` receives their source."""
    made.append(Fresh(rng, count, request=draw))
    _run(made[-1], seed=made[-1].scheduler)


def play(case: Case) -> None:
    """Raise Defect, or whatever ours raised, if it did not bear the case."""
    _run(Recorded(case.steps, asked_for=()), seed=case.scheduler)
