"""What every stage in memory shares: hostile streams, the watch on our own logs, and the check that nothing stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio
import trio._core._run as trio_run
import trio.testing
from fuzz.case import Step
from fuzz.source import WATCH, LeftBehind, Logged, Source

from echo2.p2p.channel import REQUEST_SECONDS
from echo2.p2p.errors import Unreachable
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import PeerAddress
from echo2.p2p.transport import Piece, Stream, StreamHandler

ANSWER_SECONDS = 120.0
"""Virtual. Longest that a handler may serve one stream: reading, the longest hold, writing."""

QUIET_SECONDS = 4 * REQUEST_SECONDS
"""Virtual. After this nothing of a hostile stream may be left."""

CASES_A_CHECK = 100
"""Cases between two checks that the honest peers get on with their work and that nothing has stayed behind. In between
an honest peer asks something small beside every case."""


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def no_exception_logged() -> Iterator[None]:
    """An exception that only the transport's last guard caught is a defect, though the process lives."""
    errors, logger = _Errors(), logging.getLogger("echo2")
    logger.addHandler(errors)
    try:
        yield
    finally:
        logger.removeHandler(errors)
    for record in errors.records:
        if record.exc_info and record.exc_info[1] is not None:
            raise Logged(f"{record.name}: {record.getMessage()}") from record.exc_info[1]


async def attack(transport: Any, target: PeerAddress, step: Step, silent: list[Stream]) -> None:
    """One hostile stream. Returns when the sender has lost interest; a silent one stays open in `silent`."""
    try:
        stream = await transport.open(target, step.protocol)
    except Unreachable:
        return
    await behave(stream, step, silent)


async def behave(stream: Stream, step: Step, silent: list[Stream]) -> None:
    """Send the step's bytes and do what it says next."""
    with trio.move_on_after(ANSWER_SECONDS):
        try:
            await stream.send_all(step.data)
            if step.after == "read":
                await stream.close_write()
                while await stream.receive_some(1 << 20):
                    pass
        except Unreachable:
            return
    if step.after == "silent":
        silent.append(stream)
    elif step.after == "reset":
        await stream.reset()


class _Tap:
    """A stream whose reply is kept rather than sent."""

    def __init__(self, stream: Stream) -> None:
        self.peer = stream.peer
        self.said = b""
        self._stream = stream

    async def receive_some(self, max_bytes: int) -> bytes:
        return await self._stream.receive_some(max_bytes)

    async def receive_parts(self, max_bytes: int) -> list[Piece]:
        return await self._stream.receive_parts(max_bytes)

    def keeps(self, count: int) -> None:
        self._stream.keeps(count)

    async def send_all(self, *parts: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.said += b"".join(parts)

    async def close_write(self) -> None:
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()


STREAMED = frozenset({"chunks"})
"""Protocols in which the asker speaks again before the reply's end: these replies are not taken first and bent then."""


class Replies:
    """Stands before the handlers of one transport in memory: each reply is the source's, or the honest one.

    The honest handler has its turn all the same, so what is hostile is only what the asker hears.
    """

    def __init__(self, role: str, transport: Any, source: Source, silent: list[Stream]) -> None:
        self.asked = 0
        self._role = role
        self._source = source
        self._silent = silent
        for protocol, usual in list(transport._handlers.items()):
            transport.set_handler(protocol, self._instead(protocol, usual))

    def _instead(self, protocol: str, usual: StreamHandler) -> StreamHandler:
        async def handle(stream: Stream) -> None:
            self.asked += 1
            if self._source.calm or protocol in STREAMED:
                step = self._source.reply(self._role, protocol, b"")
                await (usual(stream) if step.after == "usual" else behave(stream, step, self._silent))
                return
            tap = _Tap(stream)
            await usual(tap)
            step = self._source.reply(self._role, protocol, tap.said)
            if step.after == "usual":
                await stream.send_all(tap.said)
                await stream.close_write()
            else:
                await behave(stream, step, self._silent)

        return handle


async def nothing_left(
    network: MemoryNetwork, peer: str, silent: list[Stream], *, seconds: float = QUIET_SECONDS
) -> None:
    """Every hostile stream has been dealt with: no handler of `peer` still runs once the silent ones timed out."""
    await trio.sleep(seconds)
    silent.clear()
    transport = network.find(peer)
    if transport is None:
        raise LeftBehind("the process left the network")
    if transport._serving:
        raise LeftBehind(f"{len(transport._serving)} streams are served for ever")


VIRTUAL_SECONDS = [0.0]
"""Played so far in this process, for the soak's report."""

TASKS: dict[str, int] = {}
"""Stage -> tasks living at the end of its last world, when all but the honest peers and the harness have gone."""


def note_tasks(name: str) -> None:
    """Before a stage lets go of its world."""
    TASKS[name] = trio.lowlevel.current_statistics().tasks_living


def run_virtual(function: Any, *arguments: Any, seed: int = 0) -> Any:
    """Under a virtual clock and a scheduler that repeats itself (private names of trio's; `sim/test_pinned.py`)."""
    import random

    clock = trio.testing.MockClock(autojump_threshold=0)
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r = True, random.Random(seed)
    try:
        with WATCH.on():
            return trio.run(function, *arguments, clock=clock)
    finally:
        vars(trio_run.GLOBAL_RUN_CONTEXT).clear()  # the alarm may have torn the run itself
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r = before
        VIRTUAL_SECONDS[0] += clock.current_time()
