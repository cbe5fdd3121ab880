"""How many requests of one peer are answered at a time: the others wait, in the order they came.

A reply lies in memory from when it is made until the asker's window and line have taken it, and an asker decides alone
how long that is. So what one peer can have made for it is bounded before it is made; nobody is refused for that, and an
asker that reads is given the next turn as soon as its line has taken the last reply.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOGETHER_MAX = 8
"""Requests of one peer on one protocol. Honest ones have one or two, and what a restart left behind."""


class Turns:
    """`together_max` turns for each peer. A peer that has none is not remembered."""

    def __init__(self, together_max: int = TOGETHER_MAX) -> None:
        self._together_max = together_max
        self._peers: dict[str, tuple[trio.Semaphore, list[int]]] = {}

    def __len__(self) -> int:
        """Peers with a turn, or waiting for one."""
        return len(self._peers)

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """Wait for one, and have it inside."""
        fresh = (trio.Semaphore(self._together_max), [0])
        places, users = self._peers.setdefault(peer, fresh)
        users[0] += 1
        try:
            async with places:
                yield
        finally:
            users[0] -= 1
            if not users[0]:
                del self._peers[peer]
