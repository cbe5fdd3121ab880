"""The scheduler in a closed loop, in virtual time: noise does not move it, a loss does, and soon."""

from __future__ import annotations

import statistics

import pytest
from sim.scheduler_drill import drill, lose_a_third, periods_until_back, random_pool, settled, share_below
from sim.scheduler_world import World

SEEDS = range(8)
FEW = range(4)
DETECTED_PERIODS = 1.0
"""Three missed heartbeats of ten seconds, a look each ten, one more where somebody has just come."""


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_third_of_the_pool_leaves_it_is_back_within_three_periods(seed, noise):
    """The true mu_pool and the one the loop sees, with missed heartbeats and snapshots to fetch; and it stays there."""
    world = settled(seed, noise=noise)
    assert share_below(world, 120) == 0
    left_at = lose_a_third(world)
    assert periods_until_back(world, world.true_mu, left_at) <= 3
    assert periods_until_back(world, world.seen_mu, left_at) <= 3
    assert share_below(world, left_at + 3 * world.rules.period_seconds) <= 0.02
    assert world.changes_within(10) <= 1


@pytest.mark.parametrize(
    ("nodes", "supply", "seed"),
    [(6, 3.0, 4), (9, 4.0, 8), (12, 3.0, 70), (12, 5.0, 3), (18, 3.0, 2), (18, 3.0, 0), (18, 3.0, 12)],
)
def test_a_small_pool_is_back_as_soon(nodes, supply, seed):
    """Two to six working nodes, 20 % noise: what is left looks sufficient where it is not, and is filled all the same.

    Seed 70 of pools of twelve took 4.6 periods while only a gap to mu_min was urgent; seeds 0 and 12 of eighteen 5.8,
    because those called in had been picked for looking fast.
    """
    world = settled(seed, nodes=nodes, supply=supply, noise=0.2)
    left_at = lose_a_third(world)
    assert periods_until_back(world, world.true_mu, left_at) <= 3
    assert world.changes_within(10) <= 1


@pytest.mark.parametrize("seed", FEW)
def test_noise_changes_no_mind_twice_in_ten_periods(seed):
    """A hundred periods of 20 % noise on mu: what works is not always the cheapest set, but it stays."""
    world = World(seed)
    world.run(100 * world.rules.period_seconds)
    assert world.changes_within(10) <= 1
    assert len(world.decisions) <= 12
    assert world.price() <= 1.6 * world.optimum(1.1 * world.mu_min)


def test_without_noise_it_costs_little_more_than_the_optimum():
    """Its benchmark was 10 % off and the loop is slow to change: on average 10 % over the optimum for mu_target."""
    worlds = [settled(seed, noise=0.0) for seed in FEW]
    over = [world.price() / world.optimum(1.1 * world.mu_min) - 1 for world in worlds]
    assert statistics.mean(over) <= 0.15


def test_volunteers_come_first():
    """With a quarter of the pool free the rented part costs less than half of what it would without."""
    paid = statistics.mean(settled(seed, free_share=0.0).price() for seed in FEW)
    mixed = statistics.mean(settled(seed, free_share=0.25).price() for seed in FEW)
    assert mixed < 0.5 * paid


def holds(drilled):
    """What is promised of any pool, whatever its nodes, warm-ups and prices."""
    assert drilled.minds_noise <= 1
    assert drilled.minds <= 1
    if drilled.possible:
        assert drilled.back <= 3
    elif drilled.rest < 0.8:  # else noise may make it look possible
        assert drilled.said
        assert drilled.all_on <= DETECTED_PERIODS


@pytest.mark.parametrize("seed", [30, 318, *FEW])
def test_a_random_pool_is_back_within_three_periods_or_all_of_it_works_at_once(seed):
    """Seeds 30 and 318 took 7.5 and 4.9 periods while those called in were taken at what they seemed to make."""
    holds(drill(random_pool(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("block", range(4))
def test_many_random_pools(block, noise):
    """Three hundred more at each noise: 2 to 40 nodes, some of them in probation, a loss at any moment of a period."""
    for seed in range(1000 + 75 * block, 1075 + 75 * block):
        holds(drill(random_pool(seed, noise)))
