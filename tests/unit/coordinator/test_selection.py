"""Equation 3: by hand, against brute force, and within its time."""

from __future__ import annotations

import random
import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.scheduler_drill import brute_force, random_offers, target_of

from echo2.coordinator import selection
from echo2.coordinator.selection import Offer, by_rho, cheapest_cover, in_order, mu_of, price_of

POOLS = 200


def gaps(seed, choose):
    """Cost over the optimum of 200 random pools of 12, each with a target from a fifth to nine tenths of it."""
    rng, found = random.Random(seed), []
    for _ in range(POOLS):
        offers = random_offers(rng)
        target = target_of(rng, offers)
        chosen = choose(offers, target)
        assert mu_of(chosen) >= target * (1 - 1e-9)
        found.append(price_of(chosen) / brute_force(offers, target) - 1)
    return sorted(found)


def figures(found):
    return statistics.mean(found), found[int(0.95 * len(found))]


def heuristic(offers, target):
    """The path of more than 16 offers without its exact core: greedy, pruned, single finishers."""
    return min(selection._finished(by_rho(offers), target * (1 - 1e-9)), key=price_of)


def test_rho_by_hand():
    """$0.36 an hour at 2 rollouts a second: 0.0001 dollars a second, 50 micro-dollars a rollout."""
    assert Offer("a", 2.0, 360_000).rho == pytest.approx(50.0)


def test_plain_greedy_is_beaten_by_a_single_finisher():
    """rho orders a (1/s, $0.1), b (10/s, $1.2), c (1/s, $0.2). For 2 a second a + c at $0.3 beats greedy's a + b."""
    offers = [Offer("a", 1.0, 100_000), Offer("b", 10.0, 1_200_000), Offer("c", 1.0, 200_000)]
    assert [offer.peer for offer in by_rho(offers)] == ["a", "b", "c"]
    assert in_order(by_rho(offers), 2.0).peers == {"a", "b"}
    assert {offer.peer for offer in heuristic(offers, 2.0)} == {"a", "c"}
    assert cheapest_cover(offers, 2.0).peers == {"a", "c"}
    assert cheapest_cover(offers, 2.0).price == 300_000


def test_what_the_last_one_made_superfluous_is_pruned():
    """For 10 a second greedy takes a (1/s) first; b alone makes 10."""
    offers = [Offer("a", 1.0, 100_000), Offer("b", 10.0, 1_200_000)]
    assert [offer.peer for offer in heuristic(offers, 10.0)] == ["b"]


def test_a_target_that_none_reach_takes_all_and_says_so():
    """And a target of nothing takes none."""
    offers = [Offer("a", 1.0, 5), Offer("b", 2.0, 5)]
    assert cheapest_cover(offers, 3.1).peers == {"a", "b"}
    assert not cheapest_cover(offers, 3.1).reached
    assert cheapest_cover(offers, 3.0).reached
    assert cheapest_cover(offers, 0.0).chosen == ()
    assert cheapest_cover([], 1.0).reached is False


def test_free_nodes_are_taken_before_paid_ones():
    """rho 0 is the cheapest there is."""
    offers = [Offer("paid", 5.0, 1), Offer("free", 1.0, 0), Offer("other", 1.0, 0)]
    assert cheapest_cover(offers, 2.0).peers == {"free", "other"}


def test_of_equal_prices_fewer_nodes_are_chosen():
    """Each node costs a broadcast."""
    offers = [Offer("a", 1.0, 100), Offer("b", 1.0, 100), Offer("c", 2.0, 200)]
    assert cheapest_cover(offers, 2.0).peers == {"c"}


@pytest.mark.parametrize("seed", range(3))
def test_pools_of_twelve_are_solved_exactly(seed):
    """200 random pools: no cost over the optimum at all."""
    assert gaps(seed, lambda offers, target: cheapest_cover(offers, target).chosen)[-1] == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_path_of_large_pools_is_near_the_optimum(seed):
    """200 random pools of 12, forced: mean at most 1.5 %, p95 at most 8 %, without and with a core of 6 offers."""
    for choose in (heuristic, lambda offers, target: cheapest_cover(offers, target, exact_max=6).chosen):
        mean, p95 = figures(gaps(seed, choose))
        assert mean <= 0.015
        assert p95 <= 0.08


def test_the_core_makes_large_pools_nearly_exact():
    """Pools of 20, solved exactly by a larger limit, against the path that they take: mean below 0.2 %."""
    rng, found = random.Random(5), []
    for _ in range(30):
        offers = random_offers(rng, 20)
        target = rng.uniform(0.2, 0.9) * mu_of(offers)
        best = cheapest_cover(offers, target, exact_max=20).price
        found.append(cheapest_cover(offers, target).price / best - 1)
    assert min(found) >= 0
    assert statistics.mean(found) < 0.002


@pytest.mark.parametrize("kind", ["random", "equal", "powers"])
def test_sixteen_offers_take_less_than_50_ms(kind):
    """Whatever the numbers: there is nothing that could blow up. CPU time, the best of five."""
    rng = random.Random(1)
    makers = {
        "random": lambda: random_offers(rng, 16),
        "equal": lambda: [Offer(f"n{i}", 1.0, 1_000_000) for i in range(16)],
        "powers": lambda: [Offer(f"n{i}", 2.0**i, 2**i) for i in range(16)],
    }
    offers, spent = makers[kind](), []
    for _ in range(5):
        start = time.process_time()
        cheapest_cover(offers, 0.55 * mu_of(offers))
        spent.append(time.process_time() - start)
    assert min(spent) < 0.05


@given(
    offers=st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 2_000_000)), min_size=1, max_size=10),
    share=st.floats(0.01, 1.0),
    exact_max=st.sampled_from([3, 16]),
)
def test_a_cover_covers_and_nothing_in_it_is_superfluous(offers, share, exact_max):
    """It reaches the target, never costs less than the optimum, and the exact one is the optimum."""
    made = [Offer(f"n{i}", mu, price) for i, (mu, price) in enumerate(offers)]
    target = share * mu_of(made)
    cover = cheapest_cover(made, target, exact_max=exact_max)
    assert cover.reached
    assert cover.mu >= target * (1 - 1e-8)
    assert cover.peers <= {offer.peer for offer in made}
    best = brute_force(made, target)
    assert cover.price >= best
    if len(made) <= exact_max:
        assert cover.price == best


@given(st.permutations(range(8)))
def test_the_order_in_which_offers_come_does_not_matter(order):
    """Equal pools give equal choices."""
    offers = random_offers(random.Random(3), 8)
    target = 0.5 * mu_of(offers)
    assert cheapest_cover([offers[i] for i in order], target).peers == cheapest_cover(offers, target).peers
