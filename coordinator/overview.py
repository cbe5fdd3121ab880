"""Builds the views from memory. Nothing here changes anything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from . import capacity
from .money import MICRO
from .pricing import PICO_PER_MICRO
from .views import EvaluationView, NodeView, PoolView, RolloutCounts, RunView, StepView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from echo2.p2p.messages import StepMetrics

    from .office import Office
    from .pool import NodeEntry
    from .run_book import RunBook
    from .run_life import RunLife

PICO = MICRO * PICO_PER_MICRO

SERIES_STEPS = 500
"""Steps a run's view carries: a curve on a screen."""

LEARNER_LATE_SECONDS = 60.0
"""A learner that has asked for nothing so long is shown as away: it asks at least every half minute."""

EXPLAINED = frozenset({"applied", "draining", "suspended", "banned"})
"""States that are why a node gets no leases."""

ALWAYS_COUNTED = frozenset({"suspended", "banned", "left"})
"""States in which nobody expects to hear of a node: it is not dead."""

COUNTED = ("held", "admitted", "consumed", "stale", "withdrawn", "rejected", "duplicate")


class Overview:
    """The coordinator's read-only side."""

    def __init__(self, office: Office, life: RunLife) -> None:
        self._office = office
        self._life = life

    def pool(self, addresses: tuple[str, ...], confinement: tuple[str, ...]) -> PoolView:
        """The pool as a whole. `confinement`: the layers that hold around the scorer."""
        office, now = self._office, self._office.clock()
        health = Counter(self._standing(node, now) for node in office.pool.nodes.values())
        t_train, t_bcast = office.t_train(), office.t_bcast()
        least = None
        if t_train is not None and t_bcast is not None:
            least = capacity.mu_min(
                kappa=office.config.run.kappa,
                t_train=t_train,
                t_bcast=t_bcast,
                rollouts_per_step=office.config.run.R,
            )
        return PoolView(
            coordinator=office.identity.peer_id,
            addresses=addresses,
            nodes_healthy=health["healthy"],
            nodes_late=health["late"],
            nodes_dead=health["dead"],
            nodes_suspended=health["suspended"],
            nodes_standby=health["standby"],
            nodes_applied=health["applied"],
            nodes_probation=health["probation"],
            nodes_draining=health["draining"],
            nodes_banned=health["banned"],
            nodes_left=health["left"],
            mu_pool=office.pool.mu(now),
            mu_min=least,
            mu_target=capacity.mu_target(least, office.config.activation.gamma),
            t_bcast_seconds=t_bcast,
            t_train_seconds=t_train,
            refused=dict(office.tally.refused),
            protocol_errors=office.complaints.total,
            scorer_confinement=confinement,
            trouble="; ".join(filter(None, [office.ledger.trouble, office.scorer_trouble])),
        )

    def nodes(self) -> list[NodeView]:
        """Every node ever admitted, in the order of admission."""
        now = self._office.clock()
        self._office.balances.catch_up(self._office.ledger)
        return [self._node(node, now) for node in self._office.pool.nodes.values()]

    def node(self, peer: str) -> NodeView:
        """One of them. Raises KeyError."""
        return self._node(self._office.pool.nodes[peer], self._office.clock())

    def run(self) -> RunView:
        """The run."""
        self._office.balances.catch_up(self._office.ledger)
        office, run, config = self._office, self._office.run, self._office.config.run
        steps = [run.steps[step] for step in sorted(run.steps)]
        last = steps[-1] if steps else None
        payroll = office.payroll
        version = run.version
        return RunView(
            run=run.name,
            task=config.task,
            model=office.prompts.text.card.name,
            state=run.state,
            state_reason=run.reason,
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
            rollouts=_counts(office.tally.train),
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
            cost_hour_dollars=sum(payroll.engaged[number].account.price for number in payroll.by_peer.values()) / MICRO,
            credits=office.balances.credits(run.name) / MICRO,
        )

    def steps(self, after: int, limit: int) -> list[StepView]:
        """The steps behind `after`, in order."""
        steps = self._office.run.steps
        return [_step(steps[step]) for step in sorted(step for step in steps if step > after)[:limit]]

    def _standing(self, node: NodeEntry, now: float) -> str:
        """What a node is counted as: it is one of these."""
        if node.state in ALWAYS_COUNTED:
            return node.state
        health = node.health(now, self._office.pool.heartbeat_seconds)
        return health if node.state == "active" or health == "dead" else node.state

    def _node(self, node: NodeEntry, now: float) -> NodeView:
        office = self._office
        counts = office.tally.by_peer.get(node.peer, Counter())
        train = _counts(counts)
        held = office.run.leases.held_by(node.peer)
        version = office.run.version
        errors, _ = office.complaints.of(node.peer)
        proved = office.proved(node.peer, node.addresses)
        engaged = office.payroll.of(node.peer)
        resting = f"resting {node.rest_until - now:.0f} s: " if now < node.rest_until else ""
        proving, measured = node.state == "probation", node.probation.benchmark
        return NodeView(
            peer=node.peer,
            name=node.name,
            software=node.software,
            addresses=proved,
            reachable=bool(proved),
            state=node.state,
            state_reason=node.state_reason,
            state_since=node.standing.since,
            state_expires=node.standing.expires,
            state_by=node.standing.actor,
            warmup_returned=node.probation.returned if proving else 0,
            warmup_failed=node.probation.failed if proving else 0,
            warmup_leases=office.config.admission.warmup_leases if proving else 0,
            benchmark_rollouts_per_second=None if measured is None else measured.rollouts_per_second,
            benchmark_tokens_per_second=None if measured is None else measured.tokens_per_second,
            leases_judged=len(node.window),
            leases_unanswered=node.window.lost,
            health=node.health(now, office.pool.heartbeat_seconds),
            last_seen_seconds=None if node.seen_at is None else now - node.seen_at,
            node_says=node.says,
            epoch=node.epoch,
            version=node.version,
            version_lag=None if version is None or node.version is None else max(0, version - node.version),
            price_hour=(node.price if engaged is None else engaged.account.price) / MICRO,
            rho_dollars=None if engaged is None or engaged.account.rho is None else engaged.account.rho / PICO,
            balance_dollars=office.balances.of(node.peer, "usd") / MICRO,
            balance_credits=office.balances.of(node.peer, "credit") / MICRO,
            standby=node.standby,
            mu=node.meter.rate(now),
            tokens_per_second=node.tokens_per_second,
            leases_held=len(held),
            samples_held=sum(lease.span.count for lease in held),
            accepted=train.held + train.admitted + train.consumed + train.stale + train.withdrawn,
            rejected=train.rejected,
            evaluated=counts["eval evaluated"],
            rollouts=train,
            protocol_errors=errors,
            reason=resting + (node.state_reason if node.state in EXPLAINED else node.last_reason),
        )


def _counts(states: Mapping[str, int]) -> RolloutCounts:
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
