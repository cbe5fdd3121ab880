"""Rate caps: a token bucket, and turns at it that are fair between all streams of all connections.

The pure core (`TokenBucket`, `Turns`) takes time as an argument. Turns are start-time fair queuing: each connection has
a virtual clock that a grant of n bytes moves by n / weight, and the one furthest behind is served next. Its weight is
the number of its streams that have something to send, so that every stream gets the same, whatever connection it is on.
Whoever was idle starts at the present, so a small request waits for one grant of the bulk, not for its backlog.

`Limiter` is the thin shell: one task that sleeps until the bucket has enough, and then lets the next turn go.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

BURST_SECONDS = 0.2
"""What the bucket saves up: bears a process busy for as long without losing rate, and is 2 % of 10 s at most."""

GRANT_SECONDS = 0.02
"""A grant for each stream: what anything urgent has to wait behind."""

GRANT_BYTES_MIN = 2048
GRANT_BYTES_MAX = 64 * 1024
"""Bounds of it: below, frames cost more than they carry; above, nothing is gained. About one Noise message."""

CONTROL_WEIGHT = 4
"""How much a control connection counts beside bulk: small requests go ahead and cannot starve bulk."""

SLEEP_SECONDS_MIN = 0.0001
"""Less would not move a clock of floats: rounding leaves a little to wait for."""

TURNS_MAX = 65_536
"""Virtual clocks kept; each connection has one while it waits, and a little longer."""


class TokenBucket:
    """Bytes that may pass: `rate` a second, at most `burst` saved up. May be overdrawn; then it is paid back first."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        if rate <= 0 or burst <= 0:
            raise ValueError("a token bucket has a rate and a burst above 0")
        self.rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def tokens(self, now: float) -> float:
        """What may pass now; negative: a debt. A clock that goes backwards gives nothing."""
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self.rate)
        self._at = now
        return self._tokens

    def spend(self, count: float, now: float) -> None:
        """`count` passed."""
        self._tokens = self.tokens(now) - count

    def seconds_until(self, count: float, now: float) -> float:
        """How long until `count` may pass; 0: now."""
        return max(0.0, (min(count, self._burst) - self.tokens(now)) / self.rate)


THROUGHPUT_SECONDS = 10.0
"""What a shown rate is measured over: long enough to be read, short enough to be of now."""

THROUGHPUT_MARKS = 20
"""Totals kept of that time."""


class Throughput:
    """Bits a second over the last THROUGHPUT_SECONDS, out of a total of bytes that only rises. Pure."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def note(self, total_bytes: int, now: float) -> None:
        """The total now; told as often as one likes."""
        if self._marks and now - self._marks[-1][0] < THROUGHPUT_SECONDS / THROUGHPUT_MARKS:
            return
        self._marks.append((now, total_bytes))
        while len(self._marks) > 1 and self._marks[1][0] <= now - THROUGHPUT_SECONDS:
            self._marks.popleft()

    def bits_per_second(self, total_bytes: int, now: float) -> float:
        """0 while nothing is known."""
        since, before = self._marks[0] if self._marks else (now, total_bytes)
        return 8 * (total_bytes - before) / (now - since) if now > since else 0.0


class Turn:
    """A place in the queue. `granted` once it has come; `wake` was then called."""

    def __init__(self, key: Hashable, count: int, weight: float, wake: Callable[[], None]) -> None:
        self.key = key
        self.count = count
        self.weight = weight
        self.wake = wake
        self.granted = False
        self.dropped = False


class Turns:
    """Who is next. Pure: `ask` queues, `next` takes."""

    def __init__(self) -> None:
        self._virtual_now = 0.0
        self._finished: dict[Hashable, float] = {}
        self._queue: list[tuple[float, int, Turn]] = []
        self._order = 0

    def ask(self, turn: Turn) -> None:
        """Queue it behind what its connection has had already."""
        start = max(self._virtual_now, self._finished.get(turn.key, 0.0))
        self._finished[turn.key] = start + turn.count / turn.weight
        self._order += 1
        heapq.heappush(self._queue, (start, self._order, turn))

    def peek(self) -> Turn | None:
        """The next one, dropped ones left out."""
        while self._queue and self._queue[0][2].dropped:
            heapq.heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    def take(self) -> Turn:
        """Take the next one off the queue."""
        start, _, turn = heapq.heappop(self._queue)
        self._virtual_now = max(self._virtual_now, start)
        if not self._queue or len(self._finished) > TURNS_MAX:
            # Nobody waits: whoever asks next starts at the present, so the past is of no use, and may not pile up.
            self._finished = {key: at for key, at in self._finished.items() if at > self._virtual_now}
            if len(self._finished) > TURNS_MAX:
                self._finished.clear()
        return turn

    def forget(self, key: Hashable) -> None:
        """The connection is gone."""
        self._finished.pop(key, None)


class Limiter:
    """One direction's cap, shared by the whole process. `run` serves it; without a cap nothing waits."""

    def __init__(self, bits_per_second: float | None, clock: Callable[[], float] = trio.current_time) -> None:
        self.bits_per_second = bits_per_second
        self.passed_bytes = 0
        self._clock = clock
        self._turns = Turns()
        self._asked = trio.Event()
        self._bucket: TokenBucket | None = None
        self.grant_bytes = GRANT_BYTES_MAX
        if bits_per_second is not None:
            rate = bits_per_second / 8
            self.grant_bytes = round(min(max(rate * GRANT_SECONDS, GRANT_BYTES_MIN), GRANT_BYTES_MAX))
            self._bucket = TokenBucket(rate, max(rate * BURST_SECONDS, self.grant_bytes), clock())

    @property
    def capped(self) -> bool:
        """Whether there is a cap at all."""
        return self._bucket is not None

    def ask(self, key: Hashable, count: int, weight: float, wake: Callable[[], None]) -> Turn:
        """A turn for `count` bytes, already counted as passed when it is granted. `wake` is called then."""
        turn = Turn(key, count, weight, wake)
        if self._bucket is None:
            turn.granted = True
            self.passed_bytes += count
            return turn
        self._turns.ask(turn)
        self._asked.set()
        return turn

    def settle(self, turn: Turn, used: int) -> None:
        """The turn was used, for more or less than it was for; or is not wanted any more (`used` = 0)."""
        turn.dropped = True
        if turn.granted:
            self.count(used - turn.count)

    def count(self, count: int) -> None:
        """Bytes that passed without a turn: control frames go first, and the next turns wait for them."""
        self.passed_bytes += count
        if self._bucket is not None and count:
            self._bucket.spend(count, self._clock())
            self._asked.set()

    def forget(self, key: Hashable) -> None:
        """The connection is gone."""
        self._turns.forget(key)

    async def pay(self, key: Hashable, count: int, weight: float) -> None:
        """Wait until `count` bytes that have come in may pass on."""
        if self._bucket is None:
            self.passed_bytes += count
            return
        granted = trio.Event()
        turn = self.ask(key, count, weight, granted.set)
        try:
            await granted.wait()
        finally:
            turn.dropped = True

    async def run(self) -> None:
        """Grant turns as the bucket fills. Runs until cancelled."""
        if self._bucket is None:
            return
        while True:
            self._asked = trio.Event()
            turn = self._turns.peek()
            if turn is None:
                await self._asked.wait()
                continue
            seconds = self._bucket.seconds_until(turn.count, self._clock())
            if seconds > 0:
                await trio.sleep(max(seconds, SLEEP_SECONDS_MIN))
                continue  # someone with a better claim may have come meanwhile
            self._turns.take()
            self._bucket.spend(turn.count, self._clock())
            self.passed_bytes += turn.count
            turn.granted = True
            turn.wake()
