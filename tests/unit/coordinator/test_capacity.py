from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator import capacity

# By hand: kappa = 2, T_train = 10 s, T_bcast = 4 s, R = 32. mu_min = 2 * 32 / (2 * 10 - 4) = 4 rollouts a second.
RUN = {"kappa": 2, "t_train": 10.0, "t_bcast": 4.0, "rollouts_per_step": 32}


def test_mu_min_by_hand():
    """Equation 2 gives 64 / 16 = 4 rollouts a second."""
    assert capacity.mu_min(**RUN) == 4.0


def test_no_rate_is_enough_when_the_broadcast_takes_the_whole_period():
    """With T_bcast >= kappa T_train the denominator is not positive and there is no mu_min."""
    assert capacity.mu_min(kappa=2, t_train=10.0, t_bcast=20.0, rollouts_per_step=32) is None


def test_overlap_holds_exactly_from_mu_min_on():
    """Equation 1 is equation 2 solved for mu: it holds at 4 rollouts a second and not below."""
    assert capacity.overlap_holds(**RUN, mu_pool=4.0)
    assert not capacity.overlap_holds(**RUN, mu_pool=3.9)
    assert not capacity.overlap_holds(**RUN, mu_pool=0.0)


def test_staleness_estimate_by_hand():
    """2 + ceil((4 + 5 + 32 / 4) / 10) - 1 = 2 + 2 - 1 = 3; without the lease's 5 s, ceil(1.2) = 2 all the same."""
    assert capacity.staleness_estimate(**RUN, lease_seconds=5.0, mu_pool=4.0) == 3
    assert capacity.staleness_estimate(**RUN, lease_seconds=0.0, mu_pool=4.0) == 3
    assert capacity.staleness_estimate(**RUN, lease_seconds=0.0, mu_pool=8.0) == 2


def test_staleness_is_not_estimated_before_it_can_be():
    """Without a rate or a step time there is no estimate, and pacing goes to S."""
    assert capacity.staleness_estimate(**RUN, lease_seconds=1.0, mu_pool=0.0) is None
    assert capacity.pacing_depth(staleness_max=3, kappa=2, estimate=None) == 3


def test_bound_under_overlap_by_hand():
    """2 + ceil(0.5 * 4 / 10) = 3."""
    assert capacity.staleness_bound_under_overlap(kappa=2, t_train=10.0, t_bcast=4.0) == 3


@given(
    kappa=st.integers(1, 8),
    t_train=st.floats(0.1, 100),
    share=st.floats(0.0, 0.9),
    rollouts=st.integers(1, 1000),
    surplus=st.floats(1.001, 10),
)
def test_the_general_bound_agrees_with_the_one_under_overlap(kappa, t_train, share, rollouts, surplus):
    """Whenever the pool satisfies equation 1, Delta_max is at most the bound under it."""
    t_bcast = share * kappa * t_train
    needed = capacity.mu_min(kappa=kappa, t_train=t_train, t_bcast=t_bcast, rollouts_per_step=rollouts)
    assert needed is not None
    general = capacity.staleness_estimate(
        kappa=kappa,
        t_train=t_train,
        t_bcast=t_bcast,
        lease_seconds=0.0,
        rollouts_per_step=rollouts,
        mu_pool=needed * surplus,
    )
    assert general is not None
    assert general <= capacity.staleness_bound_under_overlap(kappa=kappa, t_train=t_train, t_bcast=t_bcast)


def test_feasible_by_hand():
    """4 + 2 + 32 / 4 = 14 s fit into (3 - 2 + 1) * 10 s; at S = 2 there are only 10."""
    rest = {**RUN, "lease_seconds": 2.0, "mu_pool": 4.0}
    assert capacity.feasible(staleness_max=3, **rest)
    assert not capacity.feasible(staleness_max=2, **rest)


@pytest.mark.parametrize(
    ("staleness_max", "kappa", "estimate", "depth"),
    [(3, 2, 2, 2), (3, 2, 5, 3), (1, 2, 9, 1), (0, 1, 4, 0), (3, 2, 0, 1)],
)
def test_pacing_depth_is_the_smaller_of_s_and_delta(staleness_max, kappa, estimate, depth):
    """min(S, Delta), never below kappa - 1."""
    assert capacity.pacing_depth(staleness_max=staleness_max, kappa=kappa, estimate=estimate) == depth


def test_lease_size_by_hand():
    """At 3 rollouts a second half a step of 10 s is 15 samples; unmeasured nodes get the given number."""
    assert capacity.lease_samples_max(mu=3.0, t_train=10.0, samples_unmeasured=8) == 15
    assert capacity.lease_samples_max(mu=None, t_train=10.0, samples_unmeasured=8) == 8
    assert capacity.lease_samples_max(mu=0.01, t_train=10.0, samples_unmeasured=8) == 1


def test_lease_size_has_a_floor_of_one_second():
    """A step of 0.2 s would give leases of 0.1 s, which measure the network only."""
    assert capacity.lease_samples_max(mu=30.0, t_train=0.2, samples_unmeasured=8) == 30


@pytest.mark.parametrize(
    ("nodes", "quorum"), [(0, 0), (1, 1), (2, 2), (10, 10), (11, 10), (12, 11), (22, 20), (100, 91)]
)
def test_installed_quorum_by_hand(nodes, quorum):
    """ceil(N / 1.1)."""
    assert capacity.installed_quorum(nodes) == quorum


def test_a_rate_counts_only_the_time_in_which_a_lease_is_held():
    """Ten rollouts over two spells of 2 s and 3 s with a lease are 2 a second, whatever the pause between."""
    meter = capacity.RateMeter()
    meter.hold(True, 0.0)
    meter.accept(4, 2.0)
    meter.hold(False, 2.0)
    meter.hold(True, 1000.0)
    meter.accept(6, 1003.0)
    meter.hold(False, 1003.0)
    assert meter.rate(5000.0) == pytest.approx(2.0, rel=0.02)


def test_a_rate_follows_a_change_with_its_half_life():
    """After one half-life of nothing a node that did 2 a second is rated near 1 a second."""
    meter = capacity.RateMeter()
    meter.hold(True, 0.0)
    for second in range(1, 1201):
        meter.accept(2, float(second))
    assert meter.rate(1200.0) == pytest.approx(2.0, rel=0.1)
    later = meter.rate(1200.0 + capacity.RATE_HALF_LIFE_SECONDS)
    assert later is not None
    assert 0.5 < later < 1.3


def test_an_unmeasured_rate_is_none():
    """A node that accepted nothing yet has no rate, not a rate of zero."""
    meter = capacity.RateMeter()
    assert meter.rate(0.0) is None
    meter.hold(True, 0.0)
    assert meter.rate(10.0) is None


def test_the_median_is_of_recent_values():
    """An old slow phase does not count any more."""
    assert capacity.recent_median([]) is None
    assert capacity.recent_median([100.0] * 50 + [1.0] * capacity.ESTIMATE_STEPS) == 1.0
    assert math.isclose(capacity.recent_median([1.0, 2.0]) or 0.0, 1.5)


def test_mu_target_and_rho_by_hand():
    """1.1 x 4; $0.36 an hour at 2 a second is 0.00005 dollars a rollout."""
    assert capacity.mu_target(4.0) == pytest.approx(4.4)
    assert capacity.mu_target(None) is None
    assert capacity.rho(price_hour=0.36, mu=2.0) == pytest.approx(0.00005)


def test_a_benchmark_counts_like_a_minute_of_work():
    """Believed 2 a second; then 60 s of holding at 1 a second.

    Half of a half-life keeps 0.707 of the 120 rollouts in 60 s, and 0.293 of 173 s were added: (84.9 + 60) in
    (42.4 + 50.7), 1.556 a second.
    """
    meter = capacity.RateMeter()
    meter.believe(2.0, 0.0)
    assert meter.rate(0.0) == 2.0
    meter.hold(True, 0.0)
    meter.accept(60, 60.0)
    assert meter.rate(60.0) == pytest.approx(1.556, abs=0.001)


def test_a_node_that_delivers_nothing_loses_its_benchmark():
    """After ten half-lives of holding leases in vain it is rated near nothing, though it was believed fast."""
    meter = capacity.RateMeter()
    meter.believe(2.0, 0.0)
    meter.hold(True, 0.0)
    assert 0.0 < (meter.rate(10 * capacity.RATE_HALF_LIFE_SECONDS) or 0.0) < 0.01


@given(
    mu=st.floats(0.05, 20),
    believed=st.floats(0.1, 10),
    spells=st.lists(st.tuples(st.floats(1, 100), st.floats(0, 1000)), min_size=60, max_size=80),
)
def test_a_rate_comes_to_the_truth_whatever_was_believed(mu, believed, spells):
    """Steady work in spells of any length, with any pauses: the rate is the node's, and never leaves what was seen."""
    meter, now = capacity.RateMeter(), 0.0
    meter.believe(believed * mu, 0.0)
    held = 0.0
    for work, pause in spells:
        meter.hold(True, now)
        for _ in range(10):
            now += work / 10
            meter.accept(mu * work / 10, now)  # type: ignore[arg-type]  # parts of rollouts: no rounding to allow for
            rate = meter.rate(now)
            assert rate is not None
            assert min(mu, believed * mu) * 0.9 <= rate <= max(mu, believed * mu) * 1.1
        held += work
        meter.hold(False, now)
        now += pause
    if held > 10 * capacity.RATE_HALF_LIFE_SECONDS:
        assert meter.rate(now) == pytest.approx(mu, rel=0.05)


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=40))
def test_looking_at_a_rate_does_not_change_it(waits):
    """Two meters with the same history, one of them asked all the time."""
    asked, left_alone, now = capacity.RateMeter(), capacity.RateMeter(), 0.0
    for meter in (asked, left_alone):
        meter.hold(True, 0.0)
        meter.accept(3, 0.0)
    for wait in waits:
        now += wait
        asked.rate(now)
    assert asked.rate(now) == pytest.approx(left_alone.rate(now))


@pytest.mark.parametrize("slice_seconds", [3.46, 13.8])
def test_the_noise_of_a_rate_is_what_is_promised(slice_seconds):
    """Slices at random, one in s seconds, and a look at any time: no bias, relative deviation sqrt(s / 346)."""
    rng, seen = random.Random(7), []
    for _ in range(200):
        meter, now = capacity.RateMeter(), rng.expovariate(1 / slice_seconds)
        meter.believe(2 / slice_seconds, 0.0)
        meter.hold(True, 0.0)
        while now < 900:
            meter.accept(2, now)
            now += rng.expovariate(1 / slice_seconds)
        seen.append((meter.rate(900.0) or 0.0) * slice_seconds / 2)
    assert statistics.mean(seen) == pytest.approx(1.0, abs=0.03)
    assert statistics.stdev(seen) == pytest.approx(math.sqrt(slice_seconds / 346), rel=0.2)


def test_a_step_that_took_next_to_no_time_is_no_overflow():
    """The quotient is infinite; the estimate is bounded."""
    least = 5e-324
    found = capacity.staleness_estimate(
        kappa=2, t_train=least, t_bcast=1.0, lease_seconds=0.0, rollouts_per_step=8, mu_pool=1.0
    )
    assert found == 2 + int(capacity.STEPS_MAX) - 1
    assert capacity.staleness_bound_under_overlap(kappa=2, t_train=least, t_bcast=1.0) == 2 + int(capacity.STEPS_MAX)
