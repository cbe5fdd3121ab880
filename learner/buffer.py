"""The learner's replay buffer: admitted rollouts by group, and which of them a training step may use. Pure.

| event                                   | what happens to the rollout                                             |
|-----------------------------------------|-------------------------------------------------------------------------|
| arrives, its slot (group, sample) empty | held                                                                    |
| arrives again, held or decided          | ignored: the coordinator may resend                                     |
| arrives again, reported as consumed     | reported again: the coordinator's ledger was put back                   |
| arrives, slot held or consumed by another lease | stale (duplicate): a slot is never consumed twice               |
| arrives, group consumed without it      | stale (late)                                                            |
| is withdrawn while held, or unknown     | withdrawn; its slot may be filled anew                                  |
| is withdrawn after it was consumed      | ignored: the consumption stands and is reported                         |
| step t starts and v < t - S             | stale (staleness); its slot may be filled anew                          |
| step t starts and v > t                 | stale (lost version): made by weights that a damaged checkpoint lost    |
| its group is taken by step t            | consumed                                                                |
| the run is over                         | stale (run over), whether held or still to come                         |

A group is ready when all n samples are held; or when it is partial and overdue: its first sample has waited
`partial_seconds` and no older group is still waiting for its samples. A step takes R/n ready groups, oldest first (by
version, then ordinal). Staleness is judged when the step starts, never when a rollout arrives: what is fresh on arrival
may not be fresh when used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from echo2.p2p.messages import Finished

from .consumed import ConsumedSet
from .interfaces import Batch, Group

if TYPE_CHECKING:
    from echo2.p2p.messages import AdmittedRollout

    from .outbox import Key, Outbox

Drop = Literal["staleness", "lost version", "duplicate", "late", "withdrawn", "run over", "malformed"]


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a step cannot start. `retry_at`: when time alone will make one more group ready."""

    groups_ready: int
    groups_partial: int
    groups_needed: int
    retry_at: float | None

    def __str__(self) -> str:
        return f"rollouts: {self.groups_ready} of {self.groups_needed} groups ready, {self.groups_partial} partial"


@dataclass(slots=True)
class _OpenGroup:
    first_seconds: float
    rollouts: dict[int, AdmittedRollout] = field(default_factory=dict)

    @property
    def version(self) -> int:
        return min(rollout.version for rollout in self.rollouts.values())


class Buffer:
    """Holds what may still be trained on. Decisions go to the outbox; `drops` counts them by reason and length."""

    def __init__(
        self,
        *,
        group_size: int,
        groups_per_step: int,
        staleness_max: int,
        outbox: Outbox,
        consumed: ConsumedSet | None = None,
    ) -> None:
        self.consumed = consumed if consumed is not None else ConsumedSet()
        self.drops: Counter[tuple[Drop, int]] = Counter()
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._staleness_max = staleness_max
        self._outbox = outbox
        self._groups: dict[int, _OpenGroup] = {}
        self._ordinals: dict[Key, int] = {}
        self._over = False

    def __len__(self) -> int:
        """Rollouts held."""
        return len(self._ordinals)

    def add(self, rollout: AdmittedRollout, *, step: int, now: float) -> None:
        """A rollout arrived. `step` is the one being trained or waited for, `now` any steady clock in seconds."""
        key = (rollout.lease_id, rollout.sample)
        if key in self._ordinals or key in self._outbox or self._outbox.again(key):
            return
        consumed_mask = self.consumed.mask(rollout.ordinal)
        group = self._groups.get(rollout.ordinal)
        if self._over:
            self._decide(rollout, "run over", step, "the run is over")
        elif consumed_mask >> rollout.sample & 1 or (group and rollout.sample in group.rollouts):
            self._decide(rollout, "duplicate", step, "duplicate: another lease filled this slot first")
        elif consumed_mask:
            self._decide(rollout, "late", step, "late: its group was trained without it")
        elif rollout.sample >= self._group_size:
            self.refuse(rollout, step=step, reason=f"sample {rollout.sample} of a group of {self._group_size}")
        else:
            if group is None:
                group = self._groups[rollout.ordinal] = _OpenGroup(first_seconds=now)
            group.rollouts[rollout.sample] = rollout
            self._ordinals[key] = rollout.ordinal

    def refuse(self, rollout: AdmittedRollout, *, step: int, reason: str) -> None:
        """A rollout that cannot be trained on at all; the coordinator should never have admitted it."""
        self._decide(rollout, "malformed", step, f"malformed: {reason}")

    def withdraw(self, key: Key, *, step: int) -> None:
        """The rollout's node was suspended: forget it, unless it was consumed."""
        if key in self._outbox:
            return
        ordinal = self._ordinals.get(key)
        if ordinal is None:  # never seen, and now never to be used: the answer is owed all the same
            self._outbox.decide(Finished(lease_id=key[0], sample=key[1], state="withdrawn", step=step, reason=""))
            return
        self._drop(self._groups[ordinal].rollouts[key[1]], "withdrawn", step, "")

    def take(self, *, step: int, now: float, partial_seconds: float) -> Batch | Shortage:
        """The batch of step `step`, which starts now; or why there is none. Drops what is too old either way."""
        self._drop_unusable(step)
        ready: list[int] = []
        waiting = 0
        retry_at: float | None = None
        for ordinal, group in sorted(self._groups.items(), key=lambda item: (item[1].version, item[0])):
            due = group.first_seconds + partial_seconds
            if len(group.rollouts) == self._group_size or (now >= due and not waiting):
                ready.append(ordinal)
                continue
            if not waiting:  # only the oldest waiting group can become ready by time alone
                retry_at = due
            waiting += 1
        if len(ready) < self._groups_per_step:
            return Shortage(len(ready), waiting, self._groups_per_step, retry_at)
        return Batch(step, tuple(self._consume(ordinal, step) for ordinal in ready[: self._groups_per_step]))

    def finish(self, *, step: int) -> None:
        """The run is over: nothing held or still to come will be used, and all of it gets its terminal state."""
        self._over = True
        for rollout in self._held():
            self._drop(rollout, "run over", step, "the run is over")

    def _held(self) -> list[AdmittedRollout]:
        return [rollout for group in self._groups.values() for rollout in group.rollouts.values()]

    def _drop_unusable(self, step: int) -> None:
        for rollout in self._held():
            if rollout.version > step:
                self._drop(rollout, "lost version", step, f"version {rollout.version} was lost; the run is at {step}")
            elif step - rollout.version > self._staleness_max:
                reason = f"staleness {step - rollout.version} is above {self._staleness_max}"
                self._drop(rollout, "staleness", step, reason)

    def _consume(self, ordinal: int, step: int) -> Group:
        samples = self._groups.pop(ordinal).rollouts
        rollouts = tuple(samples[sample] for sample in sorted(samples))
        self.consumed.add(ordinal, sum(1 << sample for sample in samples))
        for rollout in rollouts:
            del self._ordinals[rollout.lease_id, rollout.sample]
            entry = Finished(lease_id=rollout.lease_id, sample=rollout.sample, state="consumed", step=step, reason="")
            self._outbox.decide(entry)
        return Group(ordinal, rollouts)

    def _drop(self, rollout: AdmittedRollout, drop: Drop, step: int, reason: str) -> None:
        group = self._groups[rollout.ordinal]
        del group.rollouts[rollout.sample]
        del self._ordinals[rollout.lease_id, rollout.sample]
        if not group.rollouts:
            del self._groups[rollout.ordinal]
        self._decide(rollout, drop, step, reason)

    def _decide(self, rollout: AdmittedRollout, drop: Drop, step: int, reason: str) -> None:
        self.drops[drop, length_class(len(rollout.tokens) // 4)] += 1
        state: Literal["stale", "withdrawn"] = "withdrawn" if drop == "withdrawn" else "stale"
        self._outbox.decide(
            Finished(lease_id=rollout.lease_id, sample=rollout.sample, state=state, step=step, reason=reason)
        )


def length_class(tokens: int) -> int:
    """The smallest power of two that is not below `tokens`: shows whether the long, hard ones are those dropped."""
    return 1 << max(tokens - 1, 0).bit_length()
