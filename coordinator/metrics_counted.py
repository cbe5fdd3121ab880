"""The families of `measures`: what the coordinator counted of its own work, in Prometheus' terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from .measures import Histogram, Measures


def counted_families(measures: Measures) -> Iterator[Metric]:
    """One family after the other."""
    yield _labelled(
        "echo2_leases_granted", "Leases sent to nodes, by kind.", "kind", measures.leases_granted, ("train", "eval")
    )
    text = "Leases that are no longer out: returned, rejected at intake, expired, or released (their node went away)."
    outcomes = ("returned", "rejected", "expired", "released")
    yield _labelled("echo2_leases_ended", text, "outcome", measures.leases_ended, outcomes)
    yield _counter("echo2_heartbeats_received", "Heartbeats of nodes.", measures.heartbeats_received)
    text = "Heartbeats that nodes did not send in time; three of one node are its death."
    yield _counter("echo2_heartbeats_missed", text, measures.heartbeats_missed)
    text = "Requests of peers, by protocol and outcome (ok, a refusal's code, error)."
    requests = CounterMetricFamily("echo2_wire_requests", text, labels=["protocol", "outcome"])
    for labels, count in sorted(measures.wire.items()):
        requests.add_metric(labels, count)
    yield requests
    refused = CounterMetricFamily("echo2_hello_refusals", "Hellos that were refused, by code.", labels=["code"])
    for (protocol, outcome), count in sorted(measures.wire.items()):
        if protocol == "hello" and outcome != "ok":
            refused.add_metric([outcome], count)
    yield refused
    yield _counter("echo2_learner_steps", "Training steps reported.", measures.steps)
    yield _counter("echo2_learner_train_seconds", "Time the learner trained.", measures.train_seconds)
    yield _counter("echo2_learner_idle_seconds", "Time the learner waited for rollouts.", measures.idle_seconds)
    if measures.stepped_wall is not None:
        text = "When the last training step was reported, in Unix time."
        yield GaugeMetricFamily("echo2_learner_last_step_timestamp_seconds", text, value=measures.stepped_wall)
    text = "Staleness of the rollouts trained on."
    yield _histogram("echo2_rollout_staleness_steps", text, measures.staleness)
    text = "From publish until enough nodes can generate with it, each broadcast (T_bcast)."
    yield _histogram("echo2_broadcast_duration_seconds", text, measures.broadcasts)
    text = "Duration of REST requests, by route and class of status."
    rest = HistogramMetricFamily("echo2_rest_request_duration_seconds", text, labels=["route", "status"])
    for route, histogram in sorted(measures.rest.items()):
        rest.add_metric(route, histogram.cumulative(), histogram.sum)
    yield rest
    text = "Duration of the ledger's commits."
    yield _histogram("echo2_ledger_commit_duration_seconds", text, measures.ledger.commits)
    yield _counter("echo2_ledger_failures", "Transactions the ledger could not make.", measures.ledger.failures)
    text = "How late the event loop runs what is due: everything else waits as long."
    yield _histogram("echo2_event_loop_lag_seconds", text, measures.loop_lag)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(name: str, text: str, label: str, counts: Mapping[str, int], always: Sequence[str]) -> Metric:
    """With 0 for the values that are `always` there: a rate needs a first sample."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value in dict.fromkeys((*always, *sorted(counts))):
        family.add_metric([value], counts.get(value, 0))
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.sum)
