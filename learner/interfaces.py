"""What the learner's parts say to each other. No torch here: the loop runs under a virtual clock with `fake_trainer`.

Version v is the number of training steps finished. Step t turns v = t into t + 1 (DESIGN section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from echo2.p2p.messages import AdmittedRollout, Culprit, Finished, StepMetrics


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt, in the order of their samples; `ordinal` is the prompt's place in the curriculum."""

    ordinal: int
    rollouts: tuple[AdmittedRollout, ...]

    @property
    def version(self) -> int:
        """The oldest version among the rollouts: a reissued slice may be newer than its siblings."""
        return min(rollout.version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Batch:
    """What step `step` consumes: R/n groups, fewer than R rollouts when some groups are partial."""

    step: int
    groups: tuple[Group, ...]

    @property
    def rollouts(self) -> tuple[AdmittedRollout, ...]:
        """All rollouts, group after group."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    @property
    def staleness(self) -> int:
        """Delta(t) = t - x, x the oldest version in the batch (DESIGN section 7)."""
        return self.step - min(group.version for group in self.groups)

    @property
    def staleness_mean(self) -> float:
        """Mean over the rollouts of t - v."""
        versions = [rollout.version for rollout in self.rollouts]
        return self.step - sum(versions) / len(versions)


@dataclass(frozen=True, slots=True)
class TrainStats:
    """What one training step measured; every number is finite (`measures.step_stats` makes it).

    `ratio_mean` is the mean of w = min(pi_learner,old / pi_sampler, C), `ratio_max` the largest before truncation,
    `truncated_share` the share of tokens where it was above C. `clip_share` is the share of tokens whose
    pi_theta / pi_learner,old was clipped, `clip_share_low` and `clip_share_high` its two sides. `kl_reference` is None
    without a reference. An update left out (a number that is not finite, a ratio that exploded) has its reason in
    `updates_skipped`, and the rollouts that it was due to in `culprits`, as far as they are known.
    """

    loss: float
    ratio_mean: float
    clip_share: float
    kl_sampler_learner: float
    entropy: float
    gradient_norm: float
    groups_without_spread: int
    updates: int
    updates_skipped: tuple[str, ...] = ()
    kl_by_node: Mapping[str, float] = field(default_factory=dict)
    tokens_by_node: Mapping[str, int] = field(default_factory=dict)
    ratio_max: float = 0.0
    truncated_share: float = 0.0
    clip_share_low: float = 0.0
    clip_share_high: float = 0.0
    kl_reference: float | None = None
    culprits: tuple[Culprit, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, as a checkpoint keeps it beside the weights (DESIGN section 11).

    `consumed` is exact: (first, stop, mask) says that of each group first <= ordinal < stop, the samples whose bit is
    set in `mask` were trained on. `finished` and `steps` are what the coordinator has not yet acknowledged; `recent` is
    what it has, the newest consumptions, to be told again to a ledger that was put back to an older state.
    """

    run: str
    epoch: int
    version: int
    consumed: tuple[tuple[int, int, int], ...] = ()
    finished: tuple[Finished, ...] = ()
    steps: tuple[StepMetrics, ...] = ()
    recent: tuple[Finished, ...] = ()


class Trainer(Protocol):
    """The weights and what changes them. `trainer.TorchTrainer` is the real one, `fake_trainer.FakeTrainer` the fake.

    No two methods run at once, except that `export` may overlap with `train`.
    """

    async def train(self, batch: Batch) -> TrainStats:
        """One training step: `updates_per_step` optimiser updates. A bad number costs an update, never the run."""

    async def save(self, progress: Progress) -> None:
        """Keep the weights, the optimiser and `progress` as one checkpoint. Durable when this returns.

        Raises OSError (disk full, for one); the checkpoints of before are untouched.
        """

    async def restore(self) -> Progress | None:
        """Go back to the newest complete checkpoint; None when there is none and the weights are the base model's.

        The epoch returned is the highest ever begun here, damaged checkpoints included: what follows must be above it.
        """

    async def export(self, epoch: int, version: int, *, adapter: bool = False) -> Path:
        """The snapshot (GGUF, a new file) of a checkpoint that `save` made: what is published is what is durable.

        With `adapter` only the adapter that is trained, to go on the base model; else always the whole model.
        """
