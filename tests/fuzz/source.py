"""Where a stage's hostile steps come from: drawn one by one as it goes, or recorded before. And the watch on each.

A case, as the soak counts them, is one hostile input that was given to one handler: a request, or a reply in place of
the honest one. `usual` steps, in which the peer answers as it should, are recorded but not counted.
"""

from __future__ import annotations

import random
import signal
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from fuzz.case import Step

HANG_SECONDS = 20.0
"""Of processor time, which a busy machine does not stretch. From one case to the next, or to the end of the check on
the honest peers, it may not take longer; the slowest check on a sound process takes a few seconds."""

AGAIN_SECONDS = 2.0
"""Between further alarms, for the case that somebody's `except Exception` took the first one."""

HOSTILE = 0.6
"""Share of the replies that are hostile: with none that are right, nothing gets far."""


class Defect(AssertionError):
    """What the fuzzer looks for: the process under test did what it must not."""

    failure = "wrong"


class Hang(Defect):
    """It went on too long."""

    failure = "hang"


class LeftBehind(Defect):
    """Something of a hostile stream stayed."""

    failure = "left-behind"


class Unserved(Defect):
    """The honest peer beside it was not served."""

    failure = "unserved"


class Logged(Defect):
    """An exception that only the last guard caught."""

    failure = "exception"


def failure_of(error: BaseException) -> tuple[str, BaseException]:
    """The class of a failure, and the innermost error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (error.failure if isinstance(error, Defect) else f"crash-{type(error).__name__}"), error


class Watch:
    """Alarm for whatever takes too long; knows the slowest case."""

    def __init__(self) -> None:
        self.slowest_seconds = 0.0
        self.slowest: Step | None = None
        self._step: Step | None = None
        self._since = 0.0

    def begin(self, step: Step | None) -> None:
        """A case begins, or (None) a check."""
        now = time.process_time()
        if self._step is not None and now - self._since > self.slowest_seconds:
            self.slowest_seconds, self.slowest = now - self._since, self._step
        self._step, self._since = step, now
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS, AGAIN_SECONDS)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Armed within."""

        def alarm(_number: int, frame: FrameType | None) -> None:
            said = f"{self._step.role} {self._step.protocol}" if self._step is not None else "the check"
            at = ", ".join(f"{Path(one.filename).name}:{one.lineno}" for one in traceback.extract_stack(frame)[-12:])
            raise Hang(f"nothing came of a case ({said}) within {HANG_SECONDS:.0f} s; at {at}")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGPROF, alarm)
        signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS, AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
            self._step = None


WATCH = Watch()


PAUSE = Step("", "", b"", "usual")
"""A moment at which no hostile peer asked anything."""


class Source(Protocol):
    """Hands out steps. `calm` is set by the stage while it checks on the honest peers: then every reply is usual."""

    calm: bool

    @property
    def spent(self) -> bool:
        """Whether there is nothing more."""

    def request(self) -> Step | None:
        """The next request of a hostile peer."""

    def reply(self, role: str, protocol: str, honest: bytes) -> Step:
        """What a hostile `role` answers on `protocol` where the honest one would have answered `honest`."""


class Fresh:
    """Drawn from `rng` until there are `count` cases."""

    def __init__(
        self,
        rng: random.Random,
        count: int,
        *,
        request: Callable[[random.Random], Step | None],
        reply: Callable[[random.Random, str, str, bytes], Step] | None = None,
    ) -> None:
        self.calm = False
        self.history: list[Step] = []
        self.scheduler = rng.getrandbits(32)
        self.cases: Counter[str] = Counter()
        self._rng = rng
        self._count = count
        self._request = request
        self._reply = reply

    @property
    def spent(self) -> bool:
        """See `Source`."""
        return self.cases.total() >= self._count

    def request(self) -> Step | None:
        """See `Source`."""
        if self.spent:
            return None
        step = self._request(self._rng)
        if step is None:
            self.history.append(PAUSE)
            return None
        return self._given(step)

    def reply(self, role: str, protocol: str, honest: bytes) -> Step:
        """See `Source`."""
        usual = Step(role, protocol, b"", "usual")
        if self.calm or self.spent:
            return usual
        if self._reply is None or self._rng.random() > HOSTILE:
            self.history.append(usual)
            return usual
        return self._given(self._reply(self._rng, role, protocol, honest))

    def _given(self, step: Step) -> Step:
        WATCH.begin(step)
        self.history.append(step)
        self.cases[step.protocol or step.role] += 1
        return step


class Recorded:
    """The steps of a case; replies in the order of each protocol."""

    def __init__(self, steps: Iterable[Step], *, asked_for: Iterable[str]) -> None:
        """`asked_for` are the roles that answer rather than ask."""
        self.calm = False
        self._replies: dict[tuple[str, str], deque[Step]] = defaultdict(deque)
        self._requests: deque[Step] = deque()
        answering = set(asked_for)
        for step in steps:
            if step.role in answering:
                self._replies[step.role, step.protocol].append(step)
            else:
                self._requests.append(step)

    @property
    def spent(self) -> bool:
        """See `Source`."""
        return not self._requests and not any(self._replies.values())

    def drop(self) -> None:
        """Give up replies that nobody asked for in all this time, once there are no more requests."""
        if not self._requests:
            self._replies.clear()

    def request(self) -> Step | None:
        """See `Source`."""
        if not self._requests:
            return None
        step = self._requests.popleft()
        if step == PAUSE:
            return None
        WATCH.begin(step)
        return step

    def reply(self, role: str, protocol: str, honest: bytes) -> Step:
        """See `Source`."""
        left = self._replies[role, protocol]
        if self.calm or not left:
            return Step(role, protocol, b"", "usual")
        WATCH.begin(left[0])
        return left.popleft()
