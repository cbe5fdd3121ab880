"""Builds the views of a run from memory. Nothing here changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import capacity
from .money import MICRO
from .views import EvaluationView, RolloutCounts, RunView, StepView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from echo2.p2p.messages import StepMetrics

    from .office import Office
    from .run_book import RunBook
    from .run_life import RunLife

SERIES_STEPS = 500
"""Steps a run's view carries: a curve on a screen."""

LEARNER_LATE_SECONDS = 60.0
"""A learner that has asked for nothing so long is shown as away: it asks at least every half minute."""

COUNTED = ("held", "admitted", "consumed", "stale", "withdrawn", "rejected", "duplicate")


class Overview:
    """The read-only side of one run."""

    def __init__(self, office: Office, life: RunLife) -> None:
        self._office = office
        self._life = life

    def run(self) -> RunView:
        """The run."""
        self._office.balances.catch_up(self._office.ledger)
        office, run, config = self._office, self._office.run, self._office.config.run
        steps = [run.steps[step] for step in sorted(run.steps)]
        last = steps[-1] if steps else None
        payroll = office.payroll
        version, least = run.version, office.mu_min()
        return RunView(
            run=run.name,
            task=config.task,
            model=office.prompts.text.card.name,
            state=run.state,
            state_reason=run.reason,
            weight=config.weight,
            nodes=sum(1 for _ in office.pool.live(office.clock())),
            mu_pool=office.pool.mu(office.clock()),
            mu_min=least,
            mu_target=capacity.mu_target(least, office.config.activation.gamma),
            learner=config.learner,
            learner_connected=run.learner_seen_at is not None
            and office.clock() - run.learner_seen_at <= LEARNER_LATE_SECONDS,
            learner_status=run.learner_status,
            epoch=run.current.manifest.epoch if run.current else None,
            version=version,
            snapshots_published=len(run.manifests),
            learner_version=run.leases.learner_version,
            steps=config.steps,
            staleness_max=config.S,
            publish_period=config.kappa,
            rollouts_per_step=config.R,
            group_size=config.n,
            waiting=self._life.waiting(),
            reserved=run.leases.reserved,
            reserved_max=None if version is None else run.leases.reserved_max(version, office.pacing_depth()),
            outstanding=run.leases.train.leased,
            rollouts=counts_view(office.tally.train),
            evaluated=office.tally.evaluated,
            evaluations=_evaluations(run),
            series=tuple(_step(metrics) for metrics in steps[-SERIES_STEPS:]),
            reward_mean=last.reward_mean if last else None,
            staleness=last.staleness if last else None,
            kl=last.kl_sampler_learner if last else None,
            bubble=_bubble(steps),
            t_train_seconds=office.t_train(),
            t_bcast_seconds=office.t_bcast(),
            staleness_estimate=office.staleness_estimate(),
            spent_dollars=payroll.spent / MICRO,
            committed_dollars=payroll.committed / MICRO,
            budget_dollars=None if payroll.budget.limit is None else payroll.budget.limit / MICRO,
            cost_hour_dollars=payroll.cost_hour / MICRO,
            credits=office.balances.credits(run.name) / MICRO,
        )

    def steps(self, after: int, limit: int) -> list[StepView]:
        """The steps behind `after`, in order."""
        steps = self._office.run.steps
        return [_step(steps[step]) for step in sorted(step for step in steps if step > after)[:limit]]


def counts_view(states: Mapping[str, int]) -> RolloutCounts:
    """Training rollouts by state."""
    known = {state: states.get(state, 0) for state in COUNTED}
    return RolloutCounts(submitted=sum(known.values()), **known)


def _evaluations(run: RunBook) -> tuple[EvaluationView, ...]:
    return tuple(
        EvaluationView(
            version=progress.version,
            purpose=progress.purpose,
            size=progress.size,
            count=progress.count,
            mean=progress.mean,
            complete=progress.complete,
            samples=progress.samples,
            reason=progress.reason,
            details=progress.details,
        )
        for _, progress in sorted(run.evaluations.items())
    )


def _step(metrics: StepMetrics) -> StepView:
    return StepView(
        step=metrics.step,
        reward_mean=metrics.reward_mean,
        staleness=metrics.staleness,
        staleness_mean=metrics.staleness_mean,
        kl=metrics.kl_sampler_learner,
        ratio_mean=metrics.ratio_mean,
        clip_share=metrics.clip_share,
        entropy=metrics.entropy,
        loss=metrics.loss,
        response_tokens_mean=metrics.response_tokens_mean,
        rollouts=metrics.rollouts,
        groups_without_spread=metrics.groups_without_spread,
        train_seconds=metrics.train_seconds,
        idle_seconds=metrics.idle_seconds,
        reward_std=metrics.reward_std,
        gradient_norm=metrics.gradient_norm,
        ratio_max=metrics.ratio_max,
        truncated_share=metrics.truncated_share,
        clip_share_low=metrics.clip_share_low,
        clip_share_high=metrics.clip_share_high,
        kl_reference=metrics.kl_reference,
        updates_skipped=metrics.updates_skipped,
        staleness_counts=metrics.staleness_counts,
        drops={f"{drop.reason}, up to {drop.tokens_max} tokens": drop.count for drop in metrics.drops},
    )


def _bubble(steps: list[StepMetrics]) -> float | None:
    """T_idle / (T_idle + T_train), without the wait before the first step: nothing could overlap with that one."""
    idle = sum(metrics.idle_seconds for metrics in steps[1:])
    train = sum(metrics.train_seconds for metrics in steps)
    return idle / (idle + train) if idle + train > 0 else None
