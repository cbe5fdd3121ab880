"""What the learner owes the coordinator: the terminal state of each rollout, and what each step measured. Pure.

- A drop (stale, withdrawn) may be reported at once; so may a step's numbers.
- A consumption may be reported only when a checkpoint that covers its step is durable: else a crash would take back
  what the coordinator was told.
- An entry stays until the coordinator has acknowledged it; reporting again is safe.
- An acknowledged one is remembered until a fetch begun after that is answered: a reply under way may still carry the
  rollout, and it must not get a second state.
- The newest acknowledged consumptions are kept: a coordinator whose ledger was put back to an older state offers such a
  rollout again, and is told again. All that this process measured is kept for the same end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from echo2.p2p.messages import Finished, StepMetrics

FINISHED_PER_REPORT = 8_192
"""Entries of one report: with reasons of full length still half of a report's frame bound."""

STEPS_PER_REPORT = 128
"""Each at most 32 KiB: the other half of the frame's bound."""

RECENT_MAX = 32_768
"""Acknowledged consumptions kept: hundreds of steps, and a few MiB in a checkpoint. Of older ones the set of consumed
samples still says that their slots are used, but not by which lease."""

Key = tuple[bytes, int]
"""(lease id, sample): names one rollout of a run for good."""


@dataclass(frozen=True, slots=True)
class Report:
    """One report's content."""

    finished: tuple[Finished, ...]
    steps: tuple[StepMetrics, ...]

    def __bool__(self) -> bool:
        return bool(self.finished or self.steps)


class Outbox:
    """Decided and not yet acknowledged. `durable_version`: steps below it are covered by a durable checkpoint."""

    def __init__(
        self,
        finished: Iterable[Finished] = (),
        steps: Iterable[StepMetrics] = (),
        *,
        recent: Iterable[Finished] = (),
        durable_version: int = 0,
    ) -> None:
        self._finished = {(entry.lease_id, entry.sample): entry for entry in finished}
        self._steps = {metrics.step: metrics for metrics in steps}
        self._recent = {(entry.lease_id, entry.sample): entry for entry in recent}
        self._measured = dict(self._steps)
        self._settled: set[Key] = set()
        self.durable_version = durable_version

    def __contains__(self, key: Key) -> bool:
        return key in self._finished or key in self._settled

    def __len__(self) -> int:
        return len(self._finished)

    def decide(self, entry: Finished) -> None:
        """Record a terminal state. The first one stands: a rollout has exactly one."""
        self._finished.setdefault((entry.lease_id, entry.sample), entry)

    def measured(self, metrics: StepMetrics) -> None:
        """Record a step's numbers."""
        self._steps[metrics.step] = self._measured[metrics.step] = metrics

    def again(self, key: Key) -> bool:
        """The coordinator offers a rollout. True when it was told of its consumption before: it is told once more."""
        entry = self._recent.pop(key, None)
        if entry is None:
            return False
        self.decide(entry)
        return True

    def measured_again(self) -> None:
        """The coordinator has forgotten some steps: tell it of all that are known here."""
        self._steps = self._measured | self._steps

    def report(self) -> Report:
        """What may be reported now, oldest first, within one message's bounds."""
        finished: list[Finished] = []
        for entry in self._finished.values():
            if len(finished) == FINISHED_PER_REPORT:
                break
            if entry.state != "consumed" or entry.step < self.durable_version:
                finished.append(entry)
        return Report(tuple(finished), tuple(self._steps.values())[:STEPS_PER_REPORT])

    def acknowledge(self, report: Report) -> None:
        """The coordinator has it. What was decided or measured anew since is kept."""
        for entry in report.finished:
            key = (entry.lease_id, entry.sample)
            self._finished.pop(key, None)
            self._settled.add(key)
            if entry.state == "consumed":
                self._recent[key] = entry
        while len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        for metrics in report.steps:
            if self._steps.get(metrics.step) == metrics:
                del self._steps[metrics.step]

    def settled(self) -> frozenset[Key]:
        """What is acknowledged by now: a fetch sent from here on cannot bring it."""
        return frozenset(self._settled)

    def forget(self, keys: frozenset[Key]) -> None:
        """A fetch sent after these were settled is answered: they cannot come any more."""
        self._settled -= keys

    def recent(self) -> tuple[Finished, ...]:
        """Acknowledged consumptions, oldest first."""
        return tuple(self._recent.values())

    def consumed_unreported(self, report: Report) -> int:
        """Consumptions that neither were acknowledged nor are in `report`."""
        waiting = sum(entry.state == "consumed" for entry in self._finished.values())
        return waiting - sum(entry.state == "consumed" for entry in report.finished)

    def unreported(self) -> Report:
        """What a checkpoint must carry: consumptions and numbers. (Drops are decided again after a crash.)"""
        consumed = tuple(entry for entry in self._finished.values() if entry.state == "consumed")
        return Report(consumed, tuple(self._steps.values()))
