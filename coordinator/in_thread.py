"""Work that blocks, beside the loop: whoever waits can be cancelled, and the thread is then left to end by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(work: Callable[[], T], limiter: trio.CapacityLimiter | None = None) -> T:
    """What `work` returns. `limiter` bounds threads, those that were left included."""
    return await trio.to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=True)  # type: ignore[call-arg]  # old stubs
