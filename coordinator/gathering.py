"""Requests that wait for one commit together: the first carries out what has gathered behind it, all answers follow.

What is asked for alone is carried out alone and at once. What comes during the pause of `rhythm` is carried out at its
end, in the order it came, in one transaction; each is answered only when that is durable.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from .ledger import LedgerUnavailable
from .rhythm import Rhythm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Q = TypeVar("Q")
A = TypeVar("A")

TOGETHER_MAX = 32
"""Requests in one transaction: its time is nobody else's."""


class _Asked(Generic[Q, A]):
    __slots__ = ("outcome", "request", "woken")

    def __init__(self, request: Q) -> None:
        self.request = request
        self.outcome: A | Exception | None = None
        self.woken = trio.Event()


class Gathering(Generic[Q, A]):
    """`carry_out` takes several requests and gives as many answers, or an exception in the place of one of them.

    When it raises, nothing of them was kept. Then each is tried alone, so that the one at fault costs nobody else
    anything; unless it was the ledger that could not be written.

    Of those that wait only the first does anything; the others sleep until it has done it for them, or until they are
    the first: a thousand that woke at the end of every pause would leave time for nothing else.
    """

    def __init__(self, carry_out: Callable[[Sequence[Q]], Sequence[A | Exception]], clock: Callable[[], float]) -> None:
        self._carry_out = carry_out
        self._clock = clock
        self._rhythm = Rhythm(clock)
        self._queue: deque[_Asked[Q, A]] = deque()

    async def ask(self, request: Q) -> A:
        """The answer, once it is durable. Raises what `carry_out` has for this request.

        Who is cancelled before it was carried out is passed over: nobody waits for it any more.
        """
        asked = _Asked[Q, A](request)
        self._queue.append(asked)
        try:
            if self._queue[0] is not asked:
                await asked.woken.wait()
            if asked.outcome is None:
                await self._lead()
        finally:
            if asked.outcome is None:
                first = self._queue[0] is asked
                self._queue.remove(asked)
                if first:
                    self._wake_first()
        assert asked.outcome is not None
        if isinstance(asked.outcome, Exception):
            raise asked.outcome
        return asked.outcome

    async def _lead(self) -> None:
        while pause := self._rhythm.pause:  # noqa: ASYNC110 - looked at again: a clock may be early
            await trio.sleep(pause)
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), TOGETHER_MAX))]
        began = self._clock()
        outcomes = self._outcomes([asked.request for asked in batch])
        self._rhythm.made(began)
        for asked, outcome in zip(batch, outcomes, strict=True):
            asked.outcome = outcome
            asked.woken.set()
        self._wake_first()

    def _wake_first(self) -> None:
        if self._queue:
            self._queue[0].woken.set()

    def _outcomes(self, asked: Sequence[Q]) -> list[A | Exception]:
        try:
            return list(self._carry_out(asked))
        except LedgerUnavailable as error:
            return [error] * len(asked)
        except Exception as error:  # noqa: BLE001 - raised again at whoever asked
            if len(asked) == 1:
                return [error]
        return [outcome for each in asked for outcome in self._outcomes([each])]
