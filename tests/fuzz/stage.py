"""What every stage shares: hostile streams, the watch on our own logs, and the check that nothing stays behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio
import trio.testing
from fuzz.case import Step

from echo2.p2p.channel import REQUEST_SECONDS
from echo2.p2p.errors import Unreachable
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import PeerAddress
from echo2.p2p.transport import Stream

ANSWER_SECONDS = 120.0
"""Virtual. Longest that a handler may serve one stream: reading, the longest hold, writing."""

QUIET_SECONDS = 4 * REQUEST_SECONDS
"""Virtual. After this nothing of a hostile stream may be left."""


class Defect(AssertionError):
    """What the fuzzer looks for: the process under test did what it must not."""


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
            raise Defect(f"{record.name}: {record.getMessage()}") from record.exc_info[1]


async def attack(transport: Any, target: PeerAddress, step: Step, nursery: trio.Nursery) -> None:
    """One hostile stream. Returns when the sender has lost interest; a silent one stays open in `nursery`."""
    try:
        stream = await transport.open(target, step.protocol)
    except Unreachable:
        return
    await behave(stream, step, nursery)


async def behave(stream: Stream, step: Step, nursery: trio.Nursery) -> None:
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
        nursery.start_soon(trio.sleep_forever)
    elif step.after == "reset":
        await stream.reset()


async def nothing_left(network: MemoryNetwork, peer: str) -> None:
    """Every hostile stream has been dealt with: no handler of `peer` still runs once the silent ones timed out."""
    await trio.sleep(QUIET_SECONDS)
    transport = network.find(peer)
    if transport is None:
        raise Defect("the process left the network")
    if transport._serving:
        raise Defect(f"{len(transport._serving)} streams are served for ever")


VIRTUAL_SECONDS = [0.0]
"""Played so far in this process, for the soak's report."""


def run_virtual(function: Any, *arguments: Any) -> Any:
    """Under a virtual clock; what it raises comes out as it is."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    try:
        return trio.run(function, *arguments, clock=clock)
    finally:
        VIRTUAL_SECONDS[0] += clock.current_time()
