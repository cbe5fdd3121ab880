"""How often commits are made while many wait for one: those that come during a pause share the next. Pure.

A commit is a wait for the disk, and nobody else is answered meanwhile. One alone is made at once. After it there is a
pause of several times what it took, so that commits of one kind never take more than a tenth of the time, however slow
the disk is: then there are just more to each. Under a virtual clock they take no time, and there is no pause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_TIMES = 9.0
"""Of what the last one took."""

PAUSE_SECONDS_MAX = 0.1
"""What it may add to an answer: a node generates for seconds for each."""


class Rhythm:
    """One kind of commit. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at = float("-inf")

    @property
    def pause(self) -> float:
        """Seconds until the next may be made; 0.0: now."""
        return max(0.0, self._free_at - self._clock())

    def made(self, began: float) -> None:
        """One is made, or was tried, since `began`."""
        now = self._clock()
        self._free_at = now + min(PAUSE_TIMES * (now - began), PAUSE_SECONDS_MAX)
