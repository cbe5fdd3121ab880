"""Hostile replies: a peer that is asked answers with whatever bytes the case holds, until it has none left."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import trio
from fuzz.case import Step
from fuzz.stage import behave

from echo2.p2p.transport import Stream, StreamHandler


class Replies:
    """Stands before the handlers of one transport in memory."""

    def __init__(self, steps: Iterable[Step], nursery: trio.Nursery) -> None:
        self.asked = 0
        self._left: dict[str, deque[Step]] = defaultdict(deque)
        self._nursery = nursery
        for step in steps:
            self._left[step.protocol].append(step)

    @property
    def left(self) -> int:
        """Replies not yet given."""
        return sum(map(len, self._left.values()))

    def drop(self) -> None:
        """The peer is honest from now on."""
        self._left.clear()

    def stand_before(self, transport: Any) -> None:
        """Every protocol the transport serves is answered from the case first."""
        for protocol, usual in list(transport._handlers.items()):
            transport.set_handler(protocol, self._instead(protocol, usual))

    def _instead(self, protocol: str, usual: StreamHandler) -> StreamHandler:
        async def handle(stream: Stream) -> None:
            self.asked += 1
            if self._left[protocol]:
                await behave(stream, self._left[protocol].popleft(), self._nursery)
            else:
                await usual(stream)

        return handle
