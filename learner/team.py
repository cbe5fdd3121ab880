"""The first process's side of a learner of several: everything that takes all of them is a turn. No torch.

A process that is lost, or that does not answer within the bound, ends the whole learner with a word on which it was and
how it ended. Nothing is lost by that: started again, it goes on from its newest checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from echo2.p2p.errors import ConfigurationError

from .launch import END_SECONDS, Helpers, first_place, give_up, helper_command
from .orders import END, NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from .launch import Place
    from .ranks import Ranks

HEARD_SHARE = 0.2
"""The first process is heard this often within the bound: four words may come late before it is taken for lost."""

LOOK_SECONDS = 0.5

LATER_SECONDS = 15.0
"""The first process leaves this much longer to the library's own error, which says more, before it gives up."""

REASON_SECONDS = 3.0
"""A broken connection is noticed before the end of the process behind it: that long the reason may take to show."""

log = logging.getLogger(__name__)


class Team:
    """The first process's way to have something done by all. Until `join`, a turn is just this process's part of it."""

    def __init__(self, helpers: Helpers | None = None, *, seconds: float = 0.0) -> None:
        self.ranks: Ranks | None = None
        self._helpers = helpers
        self._seconds = seconds
        self._turn = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._ending = threading.Event()
        self._since: float | None = None
        self._heard = time.monotonic()
        self._spoilt = False

    def join(self, place: Place) -> None:
        """Meet the others; the process ends when they do not come."""
        self._since = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="team")
        self._watcher.start()
        with self._or_give_up():
            from .ranks import Ranks  # here: a learner of one process needs none of it

            self.ranks = Ranks(place, seconds=self._seconds)
        self._heard, self._since = time.monotonic(), None

    @contextmanager
    def turn(
        self, order: str, words: Mapping[str, Any] | None = None, arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> Iterator[None]:
        """All others do `order`, the block is this process's part of it. When it fails, the processes are out of step.

        Then the learner ends: what is durable is whole, and it goes on from there when it is started again.
        """
        if self.ranks is None:
            yield
            return
        with self._turn, self._taken(self.ranks, order, words, arrays):
            yield

    def progress(self) -> None:
        """The turn that is under way goes on: the wait for the others begins anew."""
        if self._since is not None:
            self._since = time.monotonic()

    def close(self) -> None:
        """Tell the others to end, and see that they do.

        The thread that sees to them has ended as well: an interpreter that ends while a thread is inside torch aborts.
        """
        self._ending.set()
        if self.ranks is not None and not self._spoilt and self._turn.acquire(timeout=END_SECONDS):
            helpers, self._helpers = self._helpers, None  # their end is no loss any more
            try:
                self.ranks.send(END, {}, {})
            except RuntimeError as error:
                log.warning("the other processes could not be told to end: %s", error)
            if helpers is not None:
                helpers.close()
        elif self._helpers is not None:
            helpers, self._helpers = self._helpers, None
            helpers.kill()
            helpers.close()
        if self._watcher is not None:
            self._watcher.join(END_SECONDS)

    @contextmanager
    def _taken(
        self,
        ranks: Ranks,
        order: str,
        words: Mapping[str, Any] | None = None,
        arrays: Mapping[str, NDArray[Any]] | None = None,
    ) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            with self._or_give_up():
                ranks.send(order, words or {}, arrays or {})
                yield
        except BaseException:  # cancelled: this process is ending
            self._spoilt = True
            raise
        finally:
            self._heard, self._since = time.monotonic(), None

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._ending.is_set():
                raise  # the others have ended because they were told to
            log.exception("a process of the learner failed")
            deadline = time.monotonic() + REASON_SECONDS
            while self._lost() is None and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS / 10)
            self._give_up(self._lost() or (str(error).strip() or type(error).__name__).splitlines()[0])

    def _watch(self) -> None:
        while not self._ending.wait(LOOK_SECONDS):
            lost, now, since = self._lost(), time.monotonic(), self._since
            if lost is not None and (since is None or now - since > REASON_SECONDS):
                self._give_up(lost)
            if since is not None and now - since > self._seconds + LATER_SECONDS:
                self._give_up(f"its processes have not answered each other for {now - since:.0f} s")
            if now - self._heard > HEARD_SHARE * self._seconds and self._turn.acquire(blocking=False):
                try:
                    if self.ranks is not None and not self._spoilt:
                        with suppress(RuntimeError), self._taken(self.ranks, NOTHING):  # at the end; else it gave up
                            pass
                finally:
                    self._turn.release()

    def _lost(self) -> str | None:
        return None if self._helpers is None else self._helpers.lost()

    def _give_up(self, why: str) -> None:
        give_up(
            f"the learner cannot go on: {why}. Start it again: it goes on from its newest checkpoint", self._helpers
        )


@contextmanager
def open_team(
    place: Place | None, processes: int, *, home: Path, arguments: Sequence[str], seconds: float
) -> Iterator[Team]:
    """The team of a learner: torchrun's, when it set `place`; else of `processes` on this machine, started here.

    `arguments` are this process's own. Raises ConfigurationError when both are asked for.
    """
    if place is None and processes == 1:
        yield Team(seconds=seconds)
        return
    if place is not None and processes > 1:
        raise ConfigurationError("torchrun has started the processes of this learner already; leave --processes out")
    helpers = None
    if place is None:
        try:
            place = first_place(processes, home)
            helpers = Helpers(place, helper_command(arguments))
        except OSError as error:
            raise ConfigurationError(f"the learner's other processes cannot be started: {error}") from error
    team = Team(helpers, seconds=seconds)
    try:
        team.join(place)
        yield team
    finally:
        team.close()
