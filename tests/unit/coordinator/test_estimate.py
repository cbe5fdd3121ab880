"""What a run is forecast to take, worked by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator.estimate import Plan, Supply, evaluation, forecast, publish_period

PLAN = Plan(S=3, kappa=2, R=100, n=10, steps=50, slice_samples=2, lease_seconds=60.0)
FAST = Supply(nodes=10, node_rate=2.0, train_seconds=10.0, broadcast_seconds=4.0)
"""mu_pool = 20 a second: r = 5 s a step, t = 10 s."""


def test_a_pool_that_is_fast_enough_leaves_the_learner_busy():
    """t = 10, r = 5, b = 4: eq 1 holds (20 >= 4 + 10); 2 x 10 s a period; L = floor(2 x 5) = 10 samples of 5 s."""
    found = forecast(PLAN, FAST)
    assert (found.step_seconds, found.bound_by, found.bubble) == (10.0, "the learner", 0.0)
    assert found.overlap
    assert (found.lease_samples, found.lease_seconds) == (10, 5.0)
    assert found.staleness_bound == 2 + 2 - 1  # kappa + ceil((4 + 5 + 5) / 10) - 1
    assert found.feasible  # 4 + 5 + 5 <= (3 - 2 + 1) x 10
    assert found.mu_min == pytest.approx(200 / 16)  # kappa R / (kappa T_train - T_bcast)
    assert found.mu_target == pytest.approx(13.75)
    assert found.nodes_needed == 7
    assert found.seconds == pytest.approx(2 * 4 + 5 + 50 * 10)


def test_a_synchronous_run_does_everything_in_turn():
    """S = 0, kappa = 1: T_bcast + L + R / mu + T_train = 4 + 5 + 5 + 10 a step."""
    found = forecast(replace(PLAN, S=0, kappa=1), FAST)
    assert (found.step_seconds, found.bound_by) == (24.0, "both in turn")
    assert found.bubble == pytest.approx(1 - 10 / 24)
    assert not found.feasible
    assert found.advice[0] == "S = 2, with kappa = 1 as it is"  # 14 <= 2 x 10


def test_a_slow_pool_decides_the_pace():
    """mu_pool = 4: r = 25 s a step, and the learner idles 15 of them."""
    found = forecast(PLAN, replace(FAST, nodes=2))
    assert (found.step_seconds, found.bound_by) == (25.0, "the pool")
    assert found.bubble == pytest.approx(0.6)
    assert not found.overlap
    assert "6 nodes" not in " ".join(found.advice)
    assert "5 nodes instead of 2" in found.advice  # 100 / ((20 - 4 - 5) x 2) = 4.5


def test_the_two_in_turn_are_worked_by_hand():
    """S = 2, kappa = 2: m = 1, K = 1; b + l + r + t = 12 + 5 + 5 + 10 = 32 s for two steps."""
    slow_line = replace(FAST, broadcast_seconds=12.0)
    assert publish_period(replace(PLAN, S=2), slow_line, lease_seconds=5.0, depth=2) == (32.0, "both in turn")
    # S = 3: m = 2, K = 2; (12 + 5 + max(2 x 5 + 10, 5 + 2 x 10)) / 2 = 21
    assert publish_period(PLAN, slow_line, lease_seconds=5.0, depth=3) == (21.0, "both in turn")


def test_the_price_has_the_learner_in_it():
    """513 s: 10 nodes at 0.36 an hour and the learner at 2.00."""
    found = forecast(PLAN, replace(FAST, price_node_hour=0.36, price_learner_hour=2.0))
    assert found.dollars_learner == pytest.approx(513 / 3600 * 2.0)
    assert found.dollars == pytest.approx(513 / 3600 * (10 * 0.36 + 2.0))
    assert forecast(PLAN, replace(FAST, price_node_hour=0.36)).dollars is None


def test_no_pool_is_enough_when_the_broadcast_takes_as_long_as_the_steps():
    """Equation 2 has no answer at T_bcast = kappa T_train."""
    found = forecast(PLAN, replace(FAST, broadcast_seconds=20.0))
    assert found.mu_min is None
    assert found.nodes_needed is None
    assert "a faster broadcast: fewer bytes a snapshot, or more uplink at the learner" in found.advice


def test_held_out_answers_cost_the_pool_what_they_take_up_to_their_share():
    """40 prompts x 2 every second version are 40 a step: r = 140 / 4 = 35 s would be more than 100 / 4 / 0.9."""
    slow, plan = replace(FAST, nodes=2), replace(PLAN, heldout=40, eval_every=2, eval_samples=2)
    assert publish_period(plan, slow, lease_seconds=5.0, depth=3)[0] == pytest.approx(2 * 25 / 0.9)
    assert publish_period(replace(plan, eval_share=0.5), slow, lease_seconds=5.0, depth=3)[0] == pytest.approx(2 * 35)
    assert evaluation(plan, slow, 25.0) == (80, 22)  # 200 x 0.1 / 0.9
    assert evaluation(plan, FAST, 10.0) == (80, 80)  # 2 x 10 s x 20 a second, 200 of which train
    assert evaluation(replace(plan, eval_every=3), FAST, 10.0) == (80, 80)
    assert evaluation(PLAN, FAST, 10.0) == (0, 0)


def test_a_response_longer_than_half_a_step_is_said():
    """mu_i = 0.1: one sample takes 10 s, T_train is 10 s."""
    found = forecast(PLAN, replace(FAST, nodes=100, node_rate=0.1))
    assert found.lease_samples == 1
    assert found.lease_seconds == 10.0
    crowded = forecast(replace(PLAN, S=2), replace(FAST, nodes=100, node_rate=0.1))
    assert not crowded.feasible
    assert any("tokens_max" in line for line in crowded.advice)


@given(
    S=st.integers(0, 12),
    period=st.integers(1, 13),
    nodes=st.integers(1, 200),
    rate=st.floats(0.01, 50),
    train=st.floats(0.1, 1000),
    broadcast=st.floats(0, 1000),
)
def test_a_forecast_keeps_to_what_must_hold(S, period, nodes, rate, train, broadcast):  # noqa: N803
    """No step is shorter than T_train or R / mu, nor longer than all in turn; staleness is within S, or kappa's own."""
    plan = replace(PLAN, S=S, kappa=min(period, S + 1))
    supply = Supply(nodes, rate, train, broadcast)
    found = forecast(plan, supply)
    r = plan.R / supply.mu_pool
    assert found.step_seconds >= max(train, r) * (1 - 1e-9)
    assert found.step_seconds <= (broadcast + found.lease_seconds + train + r) * (1 + 1e-9)
    assert 0 <= found.bubble < 1
    assert 0 <= found.staleness <= S
    if not found.feasible:
        wanted = int(found.advice[0].removeprefix("S = ").partition(",")[0])
        assert forecast(replace(plan, S=wanted), supply).feasible
