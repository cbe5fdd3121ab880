"""The pool in Prometheus' text format, computed from the views at each scrape, in a registry of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from .views import NodeView, PoolView, RunView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NODES_SHOWN_MAX = 1000
"""Nodes with series of their own: Prometheus pays for each label value for ever, and volunteers come and go."""


class Views(Protocol):
    """What of the coordinator is shown."""

    def pool_view(self) -> PoolView:
        """The pool as a whole."""

    def nodes_view(self) -> Sequence[NodeView]:
        """Every node ever admitted."""

    def runs_view(self) -> Sequence[RunView]:
        """Every run."""


class PoolCollector:
    """A Prometheus collector that reads the views."""

    def __init__(self, views: Views) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        """One family after the other; what is not measured yet is left out, never shown as 0."""
        yield from _pool(self._views.pool_view())
        yield from _runs(self._views.runs_view())
        yield from _nodes(self._views.nodes_view()[:NODES_SHOWN_MAX])


def make_registry(views: Views) -> CollectorRegistry:
    """A registry that holds our collector alone, so that no library adds series to ours."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PoolCollector(views))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The text a scrape gets."""
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float | None) -> Iterable[Metric]:
    return [] if value is None else [GaugeMetricFamily(name, text, value=value)]


NODE_STATES = (
    *("healthy", "late", "dead", "suspended", "standby"),
    *("applied", "probation", "draining", "banned", "left"),
)


def _pool(pool: PoolView) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("echo2_nodes", "Nodes by state.", labels=["state"])
    for state in NODE_STATES:
        nodes.add_metric([state], getattr(pool, f"nodes_{state}"))
    yield nodes
    yield from _gauge("echo2_mu_pool", "Accepted rollouts per second of all active nodes.", pool.mu_pool)
    yield from _gauge("echo2_mu_min", "Rollouts per second the learner needs (equation 2).", pool.mu_min)
    yield from _gauge("echo2_mu_target", "Rollouts per second the pool is sized for, gamma mu_min.", pool.mu_target)
    refused = CounterMetricFamily("echo2_rollouts_refused", "Rollouts lost before consumption.", labels=["reason"])
    for reason, count in sorted(pool.refused.items()):
        refused.add_metric([reason], count)
    yield refused
    yield CounterMetricFamily("echo2_protocol_errors", "Times a peer broke the protocol.", value=pool.protocol_errors)
    yield GaugeMetricFamily("echo2_trouble", "1 while requests are refused (see /v1/pool).", value=bool(pool.trouble))


RUN_GAUGES = (
    ("echo2_policy_version", "Newest published version, in training steps.", "version"),
    ("echo2_learner_version", "Training steps finished.", "learner_version"),
    ("echo2_steps", "Training steps of the whole run.", "steps"),
    ("echo2_reward_mean", "Mean reward of the last step.", "reward_mean"),
    ("echo2_staleness", "Staleness of the last step, in steps.", "staleness"),
    ("echo2_staleness_budget", "S.", "staleness_max"),
    ("echo2_kl_sampler_learner", "k3 KL between sampler and learner in the last step.", "kl"),
    ("echo2_bubble_ratio", "Learner's idle share of the time, the wait before its first step left out.", "bubble"),
    ("echo2_t_train_seconds", "Seconds of one training step.", "t_train_seconds"),
    ("echo2_t_bcast_seconds", "Seconds from publish until enough nodes can generate with it.", "t_bcast_seconds"),
    ("echo2_rollouts_outstanding", "Samples leased and not yet delivered.", "outstanding"),
)


def _runs(runs: Sequence[RunView]) -> Iterator[Metric]:
    for name, text, attribute in RUN_GAUGES:
        family = GaugeMetricFamily(name, text, labels=["run"])
        for run in runs:
            value = getattr(run, attribute)
            if value is not None:
                family.add_metric([run.run], value)
        yield family
    rollouts = GaugeMetricFamily("echo2_rollouts", "Training rollouts by their state now.", labels=["run", "state"])
    submitted = CounterMetricFamily("echo2_rollouts_submitted", "Training rollouts received.", labels=["run"])
    text = "Mean held-out reward, the newest of each purpose."
    heldout = GaugeMetricFamily("echo2_heldout_reward", text, labels=["run", "purpose"])
    state = GaugeMetricFamily("echo2_run_state", "1 for the state the run is in.", labels=["run", "state"])
    for run in runs:
        for key, count in run.rollouts.model_dump().items():
            if key == "submitted":
                submitted.add_metric([run.run], count)
            else:
                rollouts.add_metric([run.run, key], count)
        newest = {one.purpose: one.mean for one in run.evaluations if one.complete and one.mean is not None}
        for purpose, mean in newest.items():
            heldout.add_metric([run.run, purpose], mean)
        state.add_metric([run.run, run.state], 1)
    yield from (rollouts, submitted, heldout, state)


def _nodes(nodes: Sequence[NodeView]) -> Iterator[Metric]:
    lag = GaugeMetricFamily("echo2_node_version_lag", "Steps behind the newest snapshot.", labels=["peer", "name"])
    mu = GaugeMetricFamily("echo2_node_mu", "Accepted rollouts per second with a lease.", labels=["peer", "name"])
    accepted = CounterMetricFamily("echo2_node_accepted", "Rollouts that passed intake.", labels=["peer", "name"])
    rejected = CounterMetricFamily("echo2_node_rejected", "Rollouts refused at intake.", labels=["peer", "name"])
    for node in nodes:
        labels = [node.peer, node.name]
        if node.version_lag is not None:
            lag.add_metric(labels, node.version_lag)
        if node.mu is not None:
            mu.add_metric(labels, node.mu)
        accepted.add_metric(labels, node.accepted)
        rejected.add_metric(labels, node.rejected)
    yield from (lag, mu, accepted, rejected)
