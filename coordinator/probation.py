"""What a new node has to show, and what any node has to keep up. Pure; a lease is told of by its id.

| part      | rule                                                                                             |
|-----------|--------------------------------------------------------------------------------------------------|
| benchmark | the first leases that are granted together: from their grant to the return of the last one, by   |
|           | the coordinator's clock, under the run's real weights. One that does not come back whole is      |
|           | tried again with the next grant                                                                  |
| warm-up   | of its first `warmup_leases` leases a share of `warmup_returned` comes back valid and in time    |
| caps      | in probation a node holds no more at once than an unmeasured one: one group                      |
| verdict   | passed once measured and the share is reached; failed once it cannot be reached any more, or the |
|           | benchmark is below `tokens_per_second_min`. Either is known as early as it is certain            |
| afterwards| of its last WINDOW_LEASES leases, LEASES_MIN at least, no more than a share of 5 % expired       |

| a lease that                                                      | warm-up          | afterwards             |
|-------------------------------------------------------------------|------------------|------------------------|
| came valid and in time                                            | returned         | returned               |
| came in time and was refused                                      | failed           | returned               |
| came after it was given up                                        | as given up      | returned               |
| late: its time was over                                           | failed           | expired                |
| gone: its process ended with it (killed, stopped, dead), or says  | as never granted | expired; the worst     |
| that it never got it                                              |                  | such end is forgiven   |
| none: given up for a reason of the coordinator's (a lost version) | as never granted | as never granted       |

A power cut takes all that a node holds, and happens to anyone once; a node that ends again and again with leases in
hand may be looking at prompts and picking, so only one of its ends is forgiven among its last WINDOW_LEASES.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Fault = Literal["late", "gone", "none"]
"""Why a lease ended without its slice; see the second table."""

SECONDS_MIN = 1e-3
"""No benchmark is shorter: a clock that stands still would make it infinitely fast."""

WINDOW_LEASES = 200
"""Of a node's last leases: at 5 %, ten may expire. A node that gets a lease a second is judged by its last minutes."""

LEASES_MIN = 40
"""Before that many, nothing is said: two of them are 5 %, and a power cut takes a handful at once."""


@dataclass(frozen=True, slots=True)
class WarmupRules:
    """As `[admission]` sets them. `leases` = 0: no probation."""

    leases: int
    returned_share: float
    tokens_per_second_min: float = 0.0

    @property
    def returned_min(self) -> int:
        """Of the warm-up's leases, how many must come back."""
        return math.ceil(self.leases * self.returned_share - 1e-9)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What a node did with its first leases, by the coordinator's clock."""

    rollouts_per_second: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A benchmark under way."""

    began: float
    out: frozenset[bytes]
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a probation ends."""

    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Probation:
    """How far a node is. `out`: leases of the warm-up that are with it."""

    returned: int = 0
    failed: int = 0
    out: frozenset[bytes] = frozenset()
    trial: Trial | None = None
    benchmark: Benchmark | None = None

    def granted(self, lease_ids: Iterable[bytes], now: float, rules: WarmupRules) -> Probation:
        """These leases are about to be sent, in this order: the first of them belong to the warm-up."""
        ids = list(lease_ids)
        room = max(0, rules.leases - self.returned - self.failed - len(self.out))
        out = self.out | frozenset(ids[:room])
        trial = self.trial
        if self.benchmark is None and trial is None and ids:
            trial = Trial(now, frozenset(ids))
        return replace(self, out=out, trial=trial)

    def came_back(
        self, lease_id: bytes, *, samples: int, tokens: int, in_time: bool, valid: bool, now: float
    ) -> Probation:
        """The slice of a lease is here."""
        after = self
        if lease_id in self.out:
            good = valid and in_time
            after = replace(
                self,
                returned=self.returned + good,
                failed=self.failed + (not good),
                out=self.out - {lease_id},
            )
        trial = self.trial
        if trial is None or lease_id not in trial.out:
            return after
        if not valid or not in_time:
            return replace(after, trial=None)
        trial = replace(
            trial, out=trial.out - {lease_id}, samples=trial.samples + samples, tokens=trial.tokens + tokens
        )
        if trial.out:
            return replace(after, trial=trial)
        seconds = max(now - trial.began, SECONDS_MIN)
        return replace(after, trial=None, benchmark=Benchmark(trial.samples / seconds, trial.tokens / seconds))

    def lost(self, lease_id: bytes, fault: Fault) -> Probation:
        """A lease ended without its slice."""
        after = self
        if lease_id in self.out:
            after = replace(self, failed=self.failed + (fault == "late"), out=self.out - {lease_id})
        if after.trial is not None and lease_id in after.trial.out:
            after = replace(after, trial=None)
        return after

    def verdict(self, rules: WarmupRules) -> Verdict | None:
        """Whether it is over; None while it is not certain."""
        if not rules.leases:
            return Verdict(True, "this coordinator has no probation")
        measured = self.benchmark
        if measured is not None and measured.tokens_per_second < rules.tokens_per_second_min:
            return Verdict(
                False,
                f"too slow: {measured.tokens_per_second:.1f} tokens/s in its benchmark, "
                f"this pool asks for {rules.tokens_per_second_min:g}",
            )
        if self.failed > rules.leases - rules.returned_min:
            return Verdict(
                False,
                f"{self.failed} of its first {rules.leases} leases did not come back valid in time; "
                f"{rules.returned_min} must",
            )
        if measured is None or self.returned < rules.returned_min:
            return None
        return Verdict(
            True,
            f"{self.returned} of its first {rules.leases} leases came back; "
            f"{measured.tokens_per_second:.1f} tokens/s, {measured.rollouts_per_second:.2f} rollouts/s",
        )


@dataclass(frozen=True, slots=True)
class Lost:
    """A lease without its slice. `ended_at`: when its process ended with it; None: its time was over."""

    lease_id: bytes
    ended_at: float | None


class LeaseWindow:
    """How the last leases of one node ended."""

    def __init__(self) -> None:
        self._ends: deque[Lost | None] = deque()  # a lost one by its id, as it may come after all
        self._lost = 0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lost(self) -> int:
        """Of them, how many never came."""
        return self._lost

    def note_lost(self, lease_id: bytes, fault: Fault, now: float) -> None:
        """One ended without its slice."""
        if fault != "none":
            self._add(Lost(lease_id, now if fault == "gone" else None))

    def note_returned(self, lease_id: bytes, *, in_time: bool) -> None:
        """A slice came, perhaps after its lease was given up."""
        if in_time:
            self._add(None)
            return
        for place, end in enumerate(self._ends):
            if end is not None and end.lease_id == lease_id:
                self._ends[place] = None
                self._lost -= 1
                return

    def verdict(self, share_max: float) -> str:
        """Why the node is not to be relied on; empty while it is."""
        count = len(self._ends)
        if count < LEASES_MIN or self._lost <= share_max * count:
            return ""
        ends = Counter(end.ended_at for end in self._ends if end is not None and end.ended_at is not None)
        held_against = self._lost - max(ends.values(), default=0)
        if held_against <= share_max * count:
            return ""
        return (
            f"{held_against} of its last {count} leases were not answered ({100 * held_against / count:.1f} %, "
            f"at most {100 * share_max:g} % may be)"
        )

    def clear(self) -> None:
        """Begin anew."""
        self._ends.clear()
        self._lost = 0

    def _add(self, end: Lost | None) -> None:
        self._ends.append(end)
        self._lost += end is not None
        if len(self._ends) > WINDOW_LEASES:
            self._lost -= self._ends.popleft() is not None
