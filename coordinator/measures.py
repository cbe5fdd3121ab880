"""What the coordinator counts of its own work, for `GET /metrics`. Pure: numbers in memory, from this process's start.

Counters only grow and begin at 0 with the process, as Prometheus expects; what must outlive it is in the ledger. Labels
are few by construction: protocols, routes and codes are ours, and beyond `LABELS_MAX` of one kind all are `OTHER`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from echo2.p2p.messages import StepMetrics

K = TypeVar("K")

LABELS_MAX = 100
"""Label values of one kind: ours are fewer, so only a defect of ours, or a peer that found one, meets this bound."""

OTHER = "other"

COMMIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BROADCAST_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
STALENESS_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 11.0, 16.0, 32.0)
"""In steps: whole up to 4, the paper's S = 6 and 11 as bounds."""

DEAD_MISSED = 3
"""Missed heartbeats of a node that has died."""


class Histogram:
    """Observations by upper bound, and their sum."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as the exposition has them."""
        total, found = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(slots=True)
class LedgerMeasures:
    """Of the ledger."""

    commits: Histogram = field(default_factory=lambda: Histogram(COMMIT_BUCKETS))
    failures: int = 0


@dataclass(slots=True)
class Measures:
    """All of it."""

    leases_granted: Counter[str] = field(default_factory=Counter)
    """By kind."""
    leases_ended: Counter[str] = field(default_factory=Counter)
    """By how: returned, rejected (its content was refused), expired, released."""
    heartbeats_received: int = 0
    heartbeats_missed: int = 0
    wire: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests answered, by protocol and outcome: ok, the code of a refusal, or error."""
    rest: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    """By route and class of status."""
    steps: int = 0
    train_seconds: float = 0.0
    idle_seconds: float = 0.0
    stepped_wall: float | None = None
    """When the last was reported, in Unix seconds."""
    staleness: Histogram = field(default_factory=lambda: Histogram(STALENESS_BUCKETS))
    """Of rollouts trained on."""
    broadcasts: Histogram = field(default_factory=lambda: Histogram(BROADCAST_BUCKETS))
    loop_lag: Histogram = field(default_factory=lambda: Histogram(LAG_BUCKETS))
    ledger: LedgerMeasures = field(default_factory=LedgerMeasures)
    _missed: dict[str, int] = field(default_factory=dict)
    """Heartbeats that each node misses just now."""

    def stepped(self, steps: Iterable[StepMetrics], wall: float) -> None:
        """The learner reported these, at `wall` in Unix seconds."""
        for each in steps:
            self.steps += 1
            self.stepped_wall = wall
            self.train_seconds += each.train_seconds
            self.idle_seconds += each.idle_seconds
            for staleness, count in enumerate(each.staleness_counts):
                self.staleness.observe(staleness, count)

    def lease_ended(self, why: str) -> None:
        """`why`: as the ledger has it, the kind before a colon."""
        self.leases_ended[why.partition(":")[0]] += 1

    def silent(self, peer: str, heartbeats: float, *, late: float, dead: float) -> None:
        """A node was last heard of so many heartbeats ago. Call for each node, again and again.

        One is missed once the node is `late`, another with each heartbeat from then on, the third with its death.
        """
        missed = DEAD_MISSED if heartbeats > dead else min(max(int(heartbeats - late + 1), 0), DEAD_MISSED - 1)
        before = self._missed.get(peer, 0)
        self.heartbeats_missed += max(missed - before, 0)
        if missed:
            self._missed[peer] = missed
        elif before:
            del self._missed[peer]

    def answered(self, protocol: str, outcome: str) -> None:
        """A request of a peer."""
        self.wire[bounded((protocol, outcome), self.wire, (protocol, OTHER))] += 1

    def served(self, route: str, status: int, seconds: float) -> None:
        """A REST request."""
        key = (route, f"{status // 100}xx")
        key = bounded(key, self.rest, (OTHER, key[1]))
        self.rest.setdefault(key, Histogram(REQUEST_BUCKETS)).observe(seconds)


def bounded(key: K, known: Mapping[K, Any], other: K) -> K:
    """`key`, or `other` where it would be one too many."""
    return key if key in known or len(known) < LABELS_MAX else other
