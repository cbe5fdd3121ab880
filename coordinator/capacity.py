"""How fast the pool must be, how stale a batch can get, and how much one node may be given (DESIGN section 7). Pure.

| name    | unit        | meaning                                                                  |
|---------|-------------|--------------------------------------------------------------------------|
| kappa   | steps       | a snapshot is published every kappa training steps                       |
| T_train | seconds     | one training step                                                        |
| T_bcast | seconds     | publish until ceil(q N) of the live active nodes can generate, q = 1/1.1 |
| R       | rollouts    | consumed by one training step                                            |
| mu      | rollouts/s  | accepted rollouts per second in which the node held at least one lease   |
| L       | seconds     | samples of a lease / mu of its node                                      |
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GAMMA = 1.1
"""mu_target = gamma mu_min (equation 3): what the pool is sized for, so that it may vary."""

LEASE_SHARE_OF_STEP = 0.5
"""L <= 0.5 T_train: whole groups as leases cap the pool near R / n nodes, and the slowest lease delays its batch."""

LEASE_SECONDS_FLOOR = 1.0
"""Below this a lease is mostly round trip: its measured rate falls, the next shrinks with it, and so on down to one."""

LEASE_SECONDS_UNMEASURED = 30.0
"""L while no training step has been timed yet (the baseline evaluation): nothing waits for a single lease then, and a
slow node that was given one sample at a time would never show what it can do side by side."""

RATE_HALF_LIFE_SECONDS = 120.0
"""A rate follows a change (another program on the GPU) within minutes, and one odd lease does not move it much."""

RATE_MEMORY_SECONDS = RATE_HALF_LIFE_SECONDS / math.log(2)
"""173 s: what is remembered of steady holding, each second weighed by its age. Weighed exactly, whenever it is looked
at: otherwise a rate that is asked for more often would be another one."""

RATE_SECONDS_MIN = 0.05
"""No rate is stated from less holding time than this: one fast lease would read as a huge pool."""

PRIOR_SECONDS = 60.0
"""What the benchmark of probation counts for, in seconds of holding: half of what decides after one half-life, nothing
after ten. A node's first lease would otherwise be all that is known of it."""

STEPS_MAX = 1e6
"""Far above any budget of staleness: more steps than this are no estimate."""

ESTIMATE_STEPS = 32
"""Training steps whose median is T_train: recent enough to follow a change, many enough to ignore one slow step."""


def overlap_holds(*, kappa: int, t_train: float, t_bcast: float, rollouts_per_step: int, mu_pool: float) -> bool:
    """Equation 1: kappa T_train >= T_bcast + kappa R / mu_pool."""
    if mu_pool <= 0:
        return False
    return kappa * t_train >= t_bcast + kappa * rollouts_per_step / mu_pool


def mu_target(least: float | None, gamma: float = GAMMA) -> float | None:
    """gamma mu_min (equation 3), `least` being mu_min; None where no rate is enough."""
    return None if least is None else gamma * least


def rho(*, price_hour: float, mu: float) -> float:
    """rho_i = (c_i / 3600) / mu_i, what one rollout of a node costs, in the unit of the price."""
    return price_hour / 3600 / mu


def mu_min(*, kappa: int, t_train: float, t_bcast: float, rollouts_per_step: int) -> float | None:
    """Equation 2: kappa R / (kappa T_train - T_bcast) rollouts per second; None when no rate is enough."""
    room = kappa * t_train - t_bcast
    return kappa * rollouts_per_step / room if room > 0 else None


def staleness_estimate(
    *, kappa: int, t_train: float, t_bcast: float, lease_seconds: float, rollouts_per_step: int, mu_pool: float
) -> int | None:
    """Delta = kappa + ceil((T_bcast + L + R / mu_pool) / T_train) - 1; the bound Delta_max has L = 0. None: unknown."""
    if t_train <= 0 or mu_pool <= 0:
        return None
    return kappa + _steps(t_bcast + lease_seconds + rollouts_per_step / mu_pool, t_train) - 1


def staleness_bound_under_overlap(*, kappa: int, t_train: float, t_bcast: float) -> int:
    """Under equation 1: Delta <= kappa + ceil((1 - 1 / kappa) T_bcast / T_train)."""
    return kappa + _steps((1 - 1 / kappa) * t_bcast, t_train)


def _steps(seconds: float, t_train: float) -> int:
    """Training steps begun in so many seconds; bounded, as a learner may report that a step took next to no time."""
    return math.ceil(min(seconds / t_train, STEPS_MAX))


def feasible(
    *,
    staleness_max: int,
    kappa: int,
    t_train: float,
    t_bcast: float,
    lease_seconds: float,
    rollouts_per_step: int,
    mu_pool: float,
) -> bool:
    """True if T_bcast + L + R / mu_pool <= (S - kappa + 1) T_train: the budget S never makes the learner wait."""
    if mu_pool <= 0:
        return False
    return t_bcast + lease_seconds + rollouts_per_step / mu_pool <= (staleness_max - kappa + 1) * t_train


def pacing_depth(*, staleness_max: int, kappa: int, estimate: int | None) -> int:
    """min(S, Delta), and S while Delta is unmeasured; never below kappa - 1, or the next snapshot could never come."""
    depth = staleness_max if estimate is None else min(staleness_max, estimate)
    return max(depth, kappa - 1)


def lease_seconds_max(t_train: float | None) -> float:
    """The longest a lease may take: 0.5 T_train, within the floor and the default above."""
    if t_train is None:
        return LEASE_SECONDS_UNMEASURED
    return max(LEASE_SHARE_OF_STEP * t_train, LEASE_SECONDS_FLOOR)


def lease_samples_max(*, mu: float | None, t_train: float | None, samples_unmeasured: int) -> int:
    """Most samples a node may hold at once, at least 1: L = samples / mu_i <= 0.5 T_train."""
    if mu is None:
        return max(1, samples_unmeasured)
    return max(1, math.floor(mu * lease_seconds_max(t_train)))


def installed_quorum(nodes: int) -> int:
    """ceil(q N) with q = 1 / 1.1, in integers: how many nodes must have a snapshot for its broadcast to be over."""
    return -(-10 * nodes // 11)


def recent_median(values: Sequence[float]) -> float | None:
    """Median of the last `ESTIMATE_STEPS` values, None when there are none."""
    return median(values[-ESTIMATE_STEPS:]) if values else None


class RateMeter:
    """mu of one node: accepted rollouts over seconds holding at least one lease, both forgotten with one half-life.

    Arrivals per wall-clock second would be throttled by pacing itself. Only holding time makes it forget: a node that
    waits for work keeps its rate. A ratio of two sums, not a mean of each lease's rate: a lease that was fast by chance
    weighs as little as it was short. With `believe`, what a benchmark measured counts like so many seconds of holding
    with so many rollouts; for rollouts that come at random that is the mean of a gamma posterior. After many half-lives
    of steady work the sums hold 173 s of it: slices that come at random, one in s seconds, give it a relative noise of
    sqrt(s / 346).
    """

    def __init__(self) -> None:
        self._accepted = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def believe(self, rate: float, now: float, *, seconds: float = PRIOR_SECONDS) -> None:
        """Start from what a benchmark measured, in rollouts per second, instead of all that was known before."""
        self._accepted, self._seconds = rate * seconds, seconds
        if self._since is not None:
            self._since = now

    def hold(self, holding: bool, now: float) -> None:
        """Say whether the node holds any lease from `now` on."""
        self._advance(now)
        self._since = now if holding else None

    def accept(self, rollouts: int, now: float) -> None:
        """Count accepted rollouts."""
        self._advance(now)
        self._accepted += rollouts

    def rate(self, now: float) -> float | None:
        """Rollouts per second of holding; None while unmeasured."""
        self._advance(now)
        if self._seconds < RATE_SECONDS_MIN or self._accepted == 0:
            return None
        return self._accepted / self._seconds

    def _advance(self, now: float) -> None:
        if self._since is None or now <= self._since:
            return
        held = now - self._since
        self._since = now
        kept = 0.5 ** (held / RATE_HALF_LIFE_SECONDS)
        self._accepted *= kept
        self._seconds = self._seconds * kept + RATE_MEMORY_SECONDS * (1 - kept)
