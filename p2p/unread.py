"""Requests that are being read, of peers that have not shown yet what they may have: bounded, and nobody is shut out.

Silence holds no place: when there is no room for one more, the oldest request of the peer with the most goes. So one
that speaks at once is disturbed only by more peers than there are places, each opening anew within its round trip.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from .guards import RECORDS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

STALLS_TOGETHER_SECONDS = 5.0
"""Requests of one peer that stall within this time are held against it once: half of the time a piece is waited for."""


class Unread:
    """`places_max` requests at a time. Each runs in the scope it gets; it must leave at once when that is cancelled."""

    def __init__(self, places_max: int) -> None:
        self._places_max = places_max
        self._places: dict[trio.CancelScope, str] = {}  # oldest first
        self._stalled: dict[str, float] = {}
        self.evicted = 0
        """Requests that had to go for others, since the start."""

    @property
    def count(self) -> int:
        """Requests being read now."""
        return len(self._places)

    def stalled(self, peer: str, now: float) -> bool:
        """A request of `peer` did not come in time: whether that is news. Streams that stall together are one line."""
        before = self._stalled.pop(peer, -math.inf)
        news = now - before >= STALLS_TOGETHER_SECONDS
        self._stalled[peer] = now if news else before
        if len(self._stalled) > RECORDS_MAX:
            del self._stalled[next(iter(self._stalled))]
        return news

    @contextmanager
    def place(self, peer: str) -> Iterator[trio.CancelScope]:
        """One request of `peer` is read inside. Its place may go to another: then `cancel_called` says so."""
        scope = trio.CancelScope()
        self._places[scope] = peer
        if len(self._places) > self._places_max:
            held = Counter(self._places.values())
            most = max(held.values())
            victim = next(each for each, whose in self._places.items() if held[whose] == most)
            del self._places[victim]
            self.evicted += 1
            victim.cancel()
        try:
            with scope:
                yield scope
        finally:
            self._places.pop(scope, None)
