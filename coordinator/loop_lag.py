"""How late the event loop is: what a task that only sleeps oversleeps, every other one waits too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from .measures import Histogram

LOOK_SECONDS = 0.25


async def watch_loop_lag(lag: Histogram, clock: Callable[[], float]) -> None:
    """Measure until cancelled. `clock` is monotonic seconds."""
    while True:
        begun = clock()
        await trio.sleep(LOOK_SECONDS)
        lag.observe(max(clock() - begun - LOOK_SECONDS, 0.0))
