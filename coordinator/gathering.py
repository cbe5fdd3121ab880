"""Requests that wait for one commit together: the first carries out what has gathered behind it, all answers follow.

What is asked for alone is carried out alone and at once. What comes during the pause of `rhythm` is carried out at its
end, in the order it came, in one transaction; each is answered only when that is durable.
"""

from __future__ import annotations

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


class _Batch(Generic[Q, A]):
    def __init__(self) -> None:
        self.asked: list[Q] = []
        self.outcomes: list[A | Exception] = []
        self.done = trio.Event()


class Gathering(Generic[Q, A]):
    """`carry_out` takes several requests and gives as many answers, or an exception in the place of one of them.

    When it raises, nothing of them was kept. Then each is tried alone, so that the one at fault costs nobody else
    anything; unless it was the ledger that could not be written.
    """

    def __init__(self, carry_out: Callable[[Sequence[Q]], Sequence[A | Exception]], clock: Callable[[], float]) -> None:
        self._carry_out = carry_out
        self._clock = clock
        self._rhythm = Rhythm(clock)
        self._batch: _Batch[Q, A] | None = None

    async def ask(self, request: Q) -> A:
        """The answer, once it is durable. Raises what `carry_out` has for this request."""
        batch = self._batch
        if batch is not None and len(batch.asked) < TOGETHER_MAX:
            number = len(batch.asked)
            batch.asked.append(request)
            await batch.done.wait()
        else:
            batch, number = _Batch[Q, A](), 0
            batch.asked.append(request)
            await self._lead(batch)
        outcome = batch.outcomes[number]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _lead(self, batch: _Batch[Q, A]) -> None:
        with trio.CancelScope(shield=True):  # an asker that goes away takes nobody with it; this is short
            while pause := self._rhythm.pause:
                if self._batch is None:
                    self._batch = batch
                await trio.sleep(pause)
        if self._batch is batch:
            self._batch = None
        began = self._clock()
        batch.outcomes = self._outcomes(batch.asked)
        self._rhythm.made(began)
        batch.done.set()

    def _outcomes(self, asked: Sequence[Q]) -> list[A | Exception]:
        try:
            return list(self._carry_out(asked))
        except LedgerUnavailable as error:
            return [error] * len(asked)
        except Exception as error:  # noqa: BLE001 - raised again at whoever asked
            if len(asked) == 1:
                return [error]
        return [outcome for each in asked for outcome in self._outcomes([each])]
