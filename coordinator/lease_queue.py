"""Nodes that wait for work, in the order they came, and the deals in which they get it.

A thousand nodes wait while the run is paced. Waking each of them whenever something changes, to find that there is
nothing for it, would be most of what a coordinator does; so they sleep until they are given something, and one task
looks for all of them (`run`). Whoever comes is looked at at once, unless the last deal was just now (`rhythm`).
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING

import trio

from echo2.p2p.errors import Refused

from .rhythm import PAUSE_SECONDS_MAX, Rhythm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from echo2.p2p.messages import Lease, LeaseRequest

    from .office import Bell
    from .pool import NodeEntry
    from .prompts import Unopened

LOOK_SECONDS = 30.0
"""The longest without a deal, when nothing rings and nothing expires."""

SPIN_SECONDS = 0.01
"""Never sooner than that because something expires, so that the loop does not spin."""


class Asker:
    """One request. `reason` is None until it was looked at, then why it has no leases. What is logged of it in another
    task's deal is logged in `context`, or the line would name no request, or another one."""

    def __init__(self, node: NodeEntry, request: LeaseRequest, deadline: float) -> None:
        self.node = node
        self.request = request
        self.deadline = deadline
        self.leases: tuple[Lease, ...] = ()
        self.reason: str | None = None
        self.retry_at = float("inf")
        self.context = copy_context()
        self.unopened: Unopened | None = None
        self._error: Exception | None = None
        self._woken = trio.Event()

    @property
    def served(self) -> bool:
        """Nothing more is decided for it: it is about to wake."""
        return self._woken.is_set()

    def give(self, leases: tuple[Lease, ...]) -> None:
        """It has these, durably."""
        self.leases = leases
        self._woken.set()

    def turn_away(self, now: float) -> None:
        """It waits no longer for what it asked for."""
        self.deadline = min(self.deadline, now)
        self._woken.set()

    def fail(self, error: Exception) -> None:
        """It gets this in their place."""
        self._error = error
        self._woken.set()

    def ask_for(self, unopened: Unopened) -> None:
        """It is to fetch this first."""
        self.unopened = unopened
        self._woken.set()

    def fetched(self) -> None:
        """It has: it may be looked at again."""
        self.unopened = None
        self._woken = trio.Event()

    async def wait(self, seconds: float) -> None:
        """Until it is served, at most so long; and if it was never looked at, for a deal. Raises what `fail` got."""
        with trio.move_on_after(max(seconds, 0.0 if self.reason is not None else 2 * PAUSE_SECONDS_MAX)):
            await self._woken.wait()
        self._woken = trio.Event()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self.reason is None and not self.leases and self.unopened is None:
            self.reason = "the coordinator is busy; ask again"


class LeaseQueue:
    """`deal` decides for those it is handed, in that order, says whether some are left over, and raises nothing."""

    def __init__(
        self,
        work: Bell,
        clock: Callable[[], float],
        deal: Callable[[Sequence[Asker]], bool],
        next_expiry: Callable[[], float | None],
    ) -> None:
        self._work = work
        self._clock = clock
        self._deal = deal
        self._next_expiry = next_expiry
        self._rhythm = Rhythm(clock)
        self._askers: dict[Asker, None] = {}
        self._left_over = False

    def join(self, asker: Asker) -> None:
        """One more waits. It is looked at now, or with others in the next deal."""
        self._askers[asker] = None
        if self._rhythm.pause:
            self._work.ring()
        else:
            self._look((asker,))

    def leave(self, asker: Asker) -> None:
        """It waits no more."""
        self._askers.pop(asker, None)

    def deal(self) -> None:
        """Look at all who wait."""
        self._look([asker for asker in self._askers if not asker.served])

    async def run(self) -> None:
        """A deal after each ring and whenever leases expire, with pauses between. For ever."""
        while True:
            if self._left_over:
                await trio.lowlevel.checkpoint()
            else:
                await self._work.wait(min(self._next_at() - self._clock(), LOOK_SECONDS))
            self._left_over = False
            while pause := self._rhythm.pause:  # noqa: ASYNC110 - another deal may make it longer
                await trio.sleep(pause)
            self.deal()

    def retire(self) -> None:
        """Another queue has taken over: they ask again."""
        for asker in self._askers:
            asker.fail(Refused("begun_anew", "the coordinator has begun anew from its ledger; ask again", 0.0))

    def _look(self, askers: Sequence[Asker]) -> None:
        if askers:
            began = self._clock()
            self._left_over |= self._deal(askers)
            self._rhythm.made(began)

    def _next_at(self) -> float:
        """When something changes by itself for one who waits: a lease expires, or a node has rested."""
        now, expiry = self._clock(), self._next_expiry()
        known = [asker.retry_at for asker in self._askers]
        if known and expiry is not None:
            known.append(expiry)
        return max(min(known, default=float("inf")), now + SPIN_SECONDS)
