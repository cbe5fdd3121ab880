"""The pool in Prometheus' text format, computed from the views at each scrape, in a registry of its own.

| read from   | families                                                                  | label values at most      |
|-------------|---------------------------------------------------------------------------|---------------------------|
| the views   | pool, money, runs, rollouts                                               | states, `REASONS_MAX`     |
| the views   | `echo2_node_...`, of the nodes heard of last                              | `NODES_SHOWN_MAX` peers   |
| `measures`  | leases, heartbeats, requests, steps, broadcasts, ledger, event loop       | `measures.LABELS_MAX`     |
| the process | CPU, memory, files; `echo2_build_info`                                    | one                       |

By Prometheus' conventions: base units at the end of a name, `_total` for what only grows, and what is not measured yet
is left out, never shown as 0. Peers are labels, names that volunteers choose are in `echo2_node_info` alone.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from .measures import OTHER, Measures
from .metrics_counted import counted_families
from .release import software_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from .views import NodeView, PoolView, RunView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NODES_SHOWN_MAX = 1000
"""Nodes with series of their own: Prometheus pays for each label value for ever, and volunteers come and go."""

REASONS_MAX = 50
"""Reasons with a series of their own: some contain words of operators and learners."""

SECONDS_PER_HOUR = 3600


class Views(Protocol):
    """What of the coordinator is shown. `measures`, where there are any, are shown too."""

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
        """One family after the other."""
        pool, nodes, runs = self._views.pool_view(), self._views.nodes_view(), self._views.runs_view()
        yield from _pool(pool, nodes)
        yield from _money(pool, nodes)
        yield from _runs(runs)
        yield _ended(pool, runs)
        yield from _nodes(sorted(nodes, key=_silence)[:NODES_SHOWN_MAX])
        measures = getattr(self._views, "measures", None)
        if isinstance(measures, Measures):
            yield from counted_families(measures)
        build = InfoMetricFamily("echo2_build", "The coordinator's release.")
        build.add_metric([], {"version": software_version()})
        yield build


def make_registry(views: Views) -> CollectorRegistry:
    """A registry with the pool and this process, so that no library adds series to ours."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PoolCollector(views))
    ProcessCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The text a scrape gets."""
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float | None) -> Iterable[Metric]:
    return [] if value is None else [GaugeMetricFamily(name, text, value=value)]


def _silence(node: NodeView) -> float:
    return math.inf if node.last_seen_seconds is None else node.last_seen_seconds


def _works(node: NodeView) -> bool:
    return node.state == "active" and node.health != "dead" and not node.standby


def _pool(pool: PoolView, nodes: Sequence[NodeView]) -> Iterator[Metric]:
    text = "Admitted nodes by state (active, standby, suspended) and health (healthy, late, dead)."
    family = GaugeMetricFamily("echo2_nodes", text, labels=["state", "health"])
    counts = Counter(
        ("standby" if node.standby and node.state == "active" else node.state, node.health) for node in nodes
    )
    for state, health in sorted({*counts, *(("active", each) for each in ("healthy", "late", "dead"))}):
        family.add_metric([state, health], counts[state, health])
    yield family
    text = "Accepted rollouts per second of all working nodes (mu_pool)."
    yield from _gauge("echo2_mu_pool_rollouts_per_second", text, pool.mu_pool)
    text = "What the learner needs (mu_min, equation 2)."
    yield from _gauge("echo2_mu_min_rollouts_per_second", text, pool.mu_min)
    text = "What the pool is sized for (gamma mu_min)."
    yield from _gauge("echo2_mu_target_rollouts_per_second", text, pool.mu_target)
    yield from _gauge(
        "echo2_broadcast_complete_ratio", "Working nodes that have the newest snapshot.", _complete(nodes)
    )
    yield CounterMetricFamily("echo2_protocol_errors", "Times a peer broke the protocol.", value=pool.protocol_errors)
    yield GaugeMetricFamily("echo2_trouble", "1 while requests are refused (see /v1/pool).", value=bool(pool.trouble))


def _complete(nodes: Sequence[NodeView]) -> float | None:
    lags = [node.version_lag for node in nodes if _works(node)]
    published = any(lag is not None for lag in lags)
    return sum(lag == 0 for lag in lags) / len(lags) if published else None


def _money(pool: PoolView, nodes: Sequence[NodeView]) -> Iterator[Metric]:
    """Of the nodes that work now, at the prices in force; nothing in a pool without any price."""
    if not any(node.price_hour for node in nodes):
        return
    spend = sum(node.price_hour for node in nodes if _works(node))
    yield from _gauge("echo2_spend_dollars_per_hour", "What the working nodes cost together.", spend)
    rho = spend / SECONDS_PER_HOUR / pool.mu_pool if pool.mu_pool else None
    yield from _gauge("echo2_rho_dollars_per_rollout", "What an accepted rollout costs (rho) over the whole pool.", rho)


RUN_GAUGES = (
    ("echo2_policy_version", "Newest published version, in training steps.", "version"),
    ("echo2_learner_version", "Training steps finished.", "learner_version"),
    ("echo2_run_weight", "Its share of the nodes is this over the sum of all open runs'.", "weight"),
    ("echo2_run_nodes", "Live nodes that are placed in it.", "nodes"),
    ("echo2_run_mu_pool_rollouts_per_second", "Accepted rollouts per second of its working nodes.", "mu_pool"),
    ("echo2_run_steps", "Training steps of the whole run.", "steps"),
    ("echo2_learner_connected", "1 while the learner asks for rollouts or reports.", "learner_connected"),
    ("echo2_publish_period_steps", "Steps between snapshots (kappa).", "publish_period"),
    ("echo2_reward_mean", "Mean reward of the last step.", "reward_mean"),
    ("echo2_staleness_steps", "Staleness of the last step.", "staleness"),
    ("echo2_staleness_budget_steps", "Largest staleness that is allowed (S).", "staleness_max"),
    ("echo2_kl_sampler_learner_nats", "k3 KL a token between sampler and learner in the last step.", "kl"),
    ("echo2_bubble_ratio", "Learner's idle share of the time, the wait before its first step left out.", "bubble"),
    ("echo2_t_train_seconds", "Duration of one training step, median of recent ones (T_train).", "t_train_seconds"),
    ("echo2_t_bcast_seconds", "From publish until enough nodes can generate with it, median.", "t_bcast_seconds"),
    ("echo2_rollouts_outstanding", "Samples leased and not yet delivered.", "outstanding"),
    ("echo2_rollouts_reserved", "Rollouts that pacing counts: consumed, queued, leased, to be reissued.", "reserved"),
    ("echo2_rollouts_reserved_max", "Pacing's bound on the reserved ones: no leases beyond.", "reserved_max"),
)


def _runs(runs: Sequence[RunView]) -> Iterator[Metric]:
    for name, text, attribute in RUN_GAUGES:
        family = GaugeMetricFamily(name, text, labels=["run"])
        for run in runs:
            value: Any = getattr(run, attribute)
            if value is not None:
                family.add_metric([run.run], float(value))
        yield family
    text = "Training rollouts that wait for their reward (held) or for the learner (admitted)."
    pending = GaugeMetricFamily("echo2_rollouts_pending", text, labels=["run", "state"])
    received = CounterMetricFamily("echo2_rollouts_received", "Training rollouts received.", labels=["run"])
    evaluated = CounterMetricFamily("echo2_rollouts_evaluated", "Held-out rollouts scored.", labels=["run"])
    text = "Training rollouts of a run in their terminal state."
    ended = CounterMetricFamily("echo2_run_rollouts", text, labels=["run", "state"])
    text = "Mean held-out reward, the newest complete one of each purpose."
    heldout = GaugeMetricFamily("echo2_heldout_reward_mean", text, labels=["run", "purpose"])
    state = GaugeMetricFamily("echo2_run_state", "1 for the state the run is in.", labels=["run", "state"])
    for run in runs:
        received.add_metric([run.run], run.rollouts.submitted)
        evaluated.add_metric([run.run], run.evaluated)
        for key in ("held", "admitted"):
            pending.add_metric([run.run, key], getattr(run.rollouts, key))
        for key in ("consumed", "stale", "withdrawn", "rejected", "duplicate"):
            ended.add_metric([run.run, key], getattr(run.rollouts, key))
        newest = {one.purpose: one.mean for one in run.evaluations if one.complete and one.mean is not None}
        for purpose, mean in newest.items():
            heldout.add_metric([run.run, purpose], mean)
        state.add_metric([run.run, run.state], 1)
    yield from (pending, received, ended, evaluated, heldout, state)


def _ended(pool: PoolView, runs: Sequence[RunView]) -> Metric:
    text = "Rollouts in their terminal state, by the kind of its reason (none for consumed ones)."
    family = CounterMetricFamily("echo2_rollouts", text, labels=["state", "reason"])
    ended = Counter({("consumed", ""): sum(run.rollouts.consumed for run in runs)})
    for place, (words, count) in enumerate(sorted(pool.refused.items(), key=lambda item: (-item[1], item[0]))):
        state, _, reason = words.partition(": ")
        ended[state, reason if place < REASONS_MAX else OTHER] += count
    for (state, reason), count in sorted(ended.items()):
        family.add_metric([state, reason], count)
    return family


NODE_GAUGES = (
    ("echo2_node_version_lag_steps", "Steps behind the newest snapshot.", "version_lag"),
    ("echo2_node_mu_rollouts_per_second", "Accepted rollouts per second holding a lease (mu).", "mu"),
    ("echo2_node_price_dollars_per_hour", "What it is paid for an hour of work; 0 for a volunteer.", "price_hour"),
    ("echo2_node_leases_held", "Leases out with it.", "leases_held"),
)

NODE_COUNTERS = (
    ("echo2_node_rollouts_accepted", "Training rollouts of it that passed intake.", "accepted"),
    ("echo2_node_rollouts_rejected", "Training rollouts of it that were refused.", "rejected"),
    ("echo2_node_protocol_errors", "Times it broke the protocol.", "protocol_errors"),
)


def _nodes(nodes: Sequence[NodeView]) -> Iterator[Metric]:
    info = InfoMetricFamily("echo2_node", "What a node calls itself.", labels=["peer"])
    for node in nodes:
        info.add_metric([node.peer], {"name": node.name, "software": node.software[:64]})
    yield info
    for kind, families in ((GaugeMetricFamily, NODE_GAUGES), (CounterMetricFamily, NODE_COUNTERS)):
        for name, text, attribute in families:
            family = kind(name, text, labels=["peer"])
            for node in nodes:
                value = getattr(node, attribute)
                if value is not None:
                    family.add_metric([node.peer], value)
            yield family
