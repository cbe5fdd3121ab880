"""What a learner measures of itself: a step's numbers for the coordinator, and the status for its owner. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo2.p2p.messages import (
    STALENESS_BINS,
    STEP_DROPS_MAX,
    STEP_NODES_MAX,
    DropCount,
    NodeMismatch,
    Record,
    StepMetrics,
)
from echo2.p2p.transport_view import TransportView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .interfaces import Batch, TrainStats

NODES_SHOWN = 32
"""Nodes whose KL the status lists, the largest first: those are the ones to look at."""


class LearnerStatus(Record):
    """The content of the learner's `status.json`. `waiting_for` is "" when nothing is waited for.

    `bubble` is T_idle / (T_idle + T_train) since this process started, without the wait before its first step: nothing
    could overlap with that one.
    """

    state: str
    run: str
    peer: str
    epoch: int
    version: int
    steps: int
    published_version: int | None
    consumed: int
    held: int
    unreported: int
    dropped: dict[str, int]
    reward: float | None
    bubble: float
    train_seconds: float
    idle_seconds: float
    kl: float | None
    kl_by_node: dict[str, float]
    updates_skipped: dict[str, int]
    waiting_for: str
    network: TransportView | None = None
    """Rates, connections, whom it cannot reach and why, whom it refuses; None where the network is simulated."""


@dataclass(slots=True)
class Gauges:
    """Totals since this process started, and the last step's numbers."""

    train_seconds: float = 0.0
    idle_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    last: StepMetrics | None = None
    kl_by_node: Mapping[str, float] = field(default_factory=dict)
    updates_skipped: dict[str, int] = field(default_factory=dict)

    def note(self, metrics: StepMetrics, stats: TrainStats) -> None:
        """A step was finished."""
        if self.last is None:
            self.warm_up_seconds = metrics.idle_seconds
        self.train_seconds += metrics.train_seconds
        self.idle_seconds += metrics.idle_seconds
        self.last = metrics
        self.kl_by_node = dict(sorted(stats.kl_by_node.items(), key=lambda item: -item[1])[:NODES_SHOWN])
        for reason in stats.updates_skipped:
            self.updates_skipped[reason] = self.updates_skipped.get(reason, 0) + 1

    @property
    def bubble(self) -> float:
        """T_idle / (T_idle + T_train), warm-up left out; 0 before the first step."""
        idle = self.idle_seconds - self.warm_up_seconds
        total = idle + self.train_seconds
        return idle / total if total > 0 else 0.0


def step_metrics(
    batch: Batch,
    stats: TrainStats,
    *,
    train_seconds: float,
    idle_seconds: float,
    drops: Mapping[tuple[str, int], int] | None = None,
) -> StepMetrics:
    """What the coordinator is told of one step. `drops`: since the step before, by reason and class of length.

    A response's length is what was drawn of it: what an environment put between its turns does not count.
    """
    rollouts = batch.rollouts
    rewards = [rollout.reward for rollout in rollouts]
    reward_mean = math.fsum(rewards) / len(rewards)
    lengths = [sum(rollout.spans[::2]) if rollout.spans else len(rollout.tokens) // 4 for rollout in rollouts]
    staleness = Counter(min(batch.step - rollout.version, STALENESS_BINS - 1) for rollout in rollouts)
    worst = sorted(stats.kl_by_node.items(), key=lambda item: -item[1])[:STEP_NODES_MAX]
    dropped = sorted((drops or {}).items(), key=lambda item: (-item[1], item[0]))[:STEP_DROPS_MAX]
    return StepMetrics(
        step=batch.step,
        rollouts=len(rollouts),
        groups=len(batch.groups),
        groups_without_spread=stats.groups_without_spread,
        staleness=batch.staleness,
        staleness_mean=batch.staleness_mean,
        reward_mean=reward_mean,
        reward_std=math.sqrt(math.fsum((reward - reward_mean) ** 2 for reward in rewards) / len(rewards)),
        loss=stats.loss,
        ratio_mean=stats.ratio_mean,
        ratio_max=stats.ratio_max,
        truncated_share=stats.truncated_share,
        clip_share=stats.clip_share,
        clip_share_low=stats.clip_share_low,
        clip_share_high=stats.clip_share_high,
        kl_sampler_learner=stats.kl_sampler_learner,
        kl_by_node=tuple(
            NodeMismatch(peer=peer, kl=kl, tokens=stats.tokens_by_node.get(peer, 0)) for peer, kl in worst
        ),
        kl_reference=stats.kl_reference,
        entropy=stats.entropy,
        response_tokens_mean=sum(lengths) / len(lengths),
        response_tokens_max=max(lengths),
        staleness_counts=tuple(staleness[age] for age in range(max(staleness) + 1)),
        drops=tuple(DropCount(reason=reason, tokens_max=tokens, count=count) for (reason, tokens), count in dropped),
        updates=stats.updates,
        updates_skipped=stats.updates_skipped,
        culprits=stats.culprits,
        gradient_norm=stats.gradient_norm,
        train_seconds=train_seconds,
        idle_seconds=idle_seconds,
    )
