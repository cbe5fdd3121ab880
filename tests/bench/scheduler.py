"""The scheduler in a closed loop over random pools, in virtual time: `python tests/bench/scheduler.py`. No network.

Three figures from the same code in one go. The last line is one JSON object.

| figure | how it is measured                                                                                          |
|--------|-------------------------------------------------------------------------------------------------------------|
| back   | random pools of 2 to 40 nodes (`scheduler_drill.random_pool`): rates, prices, warm-ups of 5 to 45 s differ, |
|        | some are in probation; noise of 0 or 20 % on mu. After forty periods a third of those that work (at least   |
|        | one) and of those that stand by goes, at any moment of a period. Periods until the true mu_pool, warmed up, |
|        | is above mu_min; `late`: more than three, of the pools whose rest can make mu_min. Of the others: whether   |
|        | the loop says so, and periods until all of them work                                                        |
| minds  | most changes of one node within ten periods: before the loss, under noise alone; and over the whole         |
| cost   | 200 pools of 12, over the optimum by brute force: what `step` rents when the rates are known (`cost`),      |
|        | the path of large pools forced on them (`cost_large`), what works after forty periods in the loop without   |
|        | noise and benchmark errors (`cost_loop`), and with 20 % and 10 % of them (`cost_loop_noise`)                |
| churn  | each node is away twice an hour for 40 to 600 s; 3 x mu_min, 20 % noise: cost, and time below mu_min        |
| nocost | the same with `nocost_seed`: prices are not looked at                                                       |
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim.scheduler_drill import (
    Drill,
    brute_force,
    churned,
    drill,
    lose_a_third,
    periods_until_back,
    random_offers,
    random_pool,
    settled,
    share_below,
    target_of,
)

from echo2.coordinator.activation import step
from echo2.coordinator.activation_records import Candidate, Look, Need, Rules, State
from echo2.coordinator.selection import Offer, cheapest_cover, price_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PERIODS_MAX = 3
CHURNED = (12, 36)
COST_MEAN_MAX, COST_P95_MAX = 0.015, 0.08
POOLS_OF_TWELVE = 200
LINES = (("2-3", 2, 3), ("4-8", 4, 8), ("9-16", 9, 16), ("17-40", 17, 40))
FIXED = ((6, 3.0), (9, 4.0), (12, 5.0), (12, 3.0), (18, 3.0), (36, 3.0), (72, 2.0))
"""Nodes, and the whole pool's rate over mu_min: the fewer work, the more one node's noise and loss weigh."""


def p95(values: Iterable[float]) -> float:
    """The value that 95 % do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]


def figures_of(drills: Sequence[Drill]) -> dict[str, Any]:
    """Of many drills."""
    possible = [each for each in drills if each.possible]
    others = [each for each in drills if not each.possible]
    back = [each.back for each in possible]
    return {
        "pools": len(drills),
        "back_mean": round(statistics.mean(back), 3),
        "back_p95": round(p95(back), 2),
        "back_worst": round(max(back), 2),
        "late": sum(each > PERIODS_MAX for each in back),
        "possible": len(possible),
        "minds_noise": max(each.minds_noise for each in drills),
        "minds": max(each.minds for each in drills),
        "called_back": sum(each.recalled for each in drills),
        "below_before": round(statistics.mean(each.below_before for each in possible), 5),
        "below_after": round(statistics.mean(each.below_after for each in possible), 5),
        "cost_before": round(statistics.mean(each.cost_before for each in possible), 4),
        "cost_after": round(statistics.mean(each.cost_after for each in possible), 4),
        "impossible": len(others),
        "impossible_said": sum(each.said for each in others),
        "impossible_all_on_p50": round(statistics.median(each.all_on for each in others), 2) if others else 0.0,
        "impossible_all_on_worst": round(max((each.all_on for each in others), default=0.0), 2),
        "said_of_possible": sum(each.said for each in possible),
        "said_of_possible_rest_most": round(max((each.rest for each in possible if each.said), default=0.0), 2),
    }


def sweep(seeds: int, noise: float, nocost: bool = False) -> dict[str, Any]:
    """Random pools, a line by size; all of them."""
    drills = [drill(random_pool(seed, noise, nocost)) for seed in range(seeds)]
    for name, least, most in LINES:
        some = [each for each in drills if least <= each.nodes <= most]
        if any(each.possible for each in some):
            print(f"{name:>5} nodes, noise {noise:.0%}: {json.dumps(figures_of(some))}", flush=True)
    for seed, each in enumerate(drills):
        if each.possible and each.back > PERIODS_MAX:
            print(f"late: seed {seed}, {each}", flush=True)
    return figures_of(drills)


def fixed(nodes: int, supply: float, seeds: int) -> dict[str, Any]:
    """Pools of one size, 20 % noise, 20 s to install: how the loop was measured before."""
    back, below, minds = [], [], 0
    for seed in range(seeds):
        world = settled(seed, nodes=nodes, supply=supply, noise=0.2)
        left_at = lose_a_third(world)
        back.append(periods_until_back(world, world.true_mu, left_at))
        below.append(share_below(world, left_at + PERIODS_MAX * world.rules.period_seconds))
        minds = max(minds, world.changes_within(10))
    found = {
        "pool": f"{nodes} x {supply:.0f}",
        "seeds": seeds,
        "back_mean": round(statistics.mean(back), 3),
        "back_p95": round(p95(back), 2),
        "back_worst": round(max(back), 2),
        "late": sum(each > PERIODS_MAX for each in back),
        "below_after": round(statistics.mean(below), 5),
        "minds": minds,
    }
    print(json.dumps(found), flush=True)
    return found


def churn(nodes: int, pools: int) -> dict[str, float]:
    """What comes and goes all the time, of so many pools."""
    found = [churned(seed, nodes) for seed in range(pools)]
    return {
        "nodes": nodes,
        "pools": pools,
        "cost": round(statistics.mean(cost for cost, _ in found), 4),
        "below": round(statistics.mean(below for _, below in found), 4),
    }


def rented(offers: Sequence[Offer], target: float, rules: Rules) -> int:
    """What `step` makes work in an empty pool, an hour."""
    candidates = tuple(Candidate(offer.peer, offer.mu, offer.price) for offer in offers)
    state, _ = step(State(), Look(candidates, (Need("run", target / rules.gamma),)), 0.0, rules)
    return sum(given.price for given in state.assigned.values())


def gaps(pools: int) -> dict[str, list[float]]:
    """Cost over the optimum by brute force, of random pools of twelve with random targets."""
    rng = random.Random(0)
    found: dict[str, list[float]] = {"cost": [], "cost_large": [], "nocost_cost": []}
    for seed in range(pools):
        offers = random_offers(rng)
        target = target_of(rng, offers)
        best = brute_force(offers, target)
        assert best
        found["cost"].append(rented(offers, target, Rules()) / best - 1)
        found["cost_large"].append(price_of(cheapest_cover(offers, target, exact_max=6).chosen) / best - 1)
        found["nocost_cost"].append(rented(offers, target, Rules(nocost_seed=seed)) / best - 1)
    return found


def loop_gaps(pools: int, noise: float, benchmark_error: float, nocost: bool = False) -> list[float]:
    """The same after forty periods in the loop, with the truth known to the optimum only."""
    found = []
    for seed in range(pools):
        supply = random.Random(f"supply {seed}").uniform(1.3, 5.0)
        rules = Rules(nocost_seed=seed if nocost else None)
        world = settled(seed, nodes=12, noise=noise, supply=supply, benchmark_error=benchmark_error, rules=rules)
        offers = [Offer(each.peer, each.mu, each.price) for each in world.usable()]
        best = brute_force(offers, rules.gamma * world.mu_min)
        assert best
        found.append(world.price() / best - 1)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, 95th percentile and worst."""
    return {"mean": round(statistics.mean(values), 4), "p95": round(p95(values), 4), "worst": round(max(values), 4)}


def main() -> None:
    """Print what is measured, and all of it as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few pools: shows that all parts work")
    parser.add_argument("--seeds", type=int, default=600, help="random pools at each noise")
    options = parser.parse_args()
    seeds, pools, sized = (40, 20, 5) if options.quick else (options.seeds, POOLS_OF_TWELVE, 100)
    costs = gaps(pools)
    result: dict[str, Any] = {
        "noise_20": sweep(seeds, 0.2),
        "noise_0": sweep(seeds // 4, 0.0),
        "sized": [fixed(nodes, supply, sized) for nodes, supply in FIXED],
        "churn": [churn(nodes, 4 * sized // 10) for nodes in CHURNED],
        "pools_of_12": pools,
        "cost": spread(costs["cost"]),
        "cost_large": spread(costs["cost_large"]),
        "cost_loop": spread(loop_gaps(pools, 0.0, 0.0)),
        "cost_loop_noise": spread(loop_gaps(pools, 0.2, 0.1)),
        "nocost": {
            "cost": spread(costs["nocost_cost"]),
            "cost_loop_noise": spread(loop_gaps(pools, 0.2, 0.1, nocost=True)),
            "noise_20": sweep(seeds // 4, 0.2, nocost=True),
        },
    }
    loops = (result["noise_20"], result["noise_0"])
    result["holds"] = {
        "back": all(each["late"] == 0 for each in (*loops, *result["sized"])),
        "minds": all(each["minds_noise"] <= 1 for each in loops),
        "cost": result["cost"]["mean"] <= COST_MEAN_MAX and result["cost"]["p95"] <= COST_P95_MAX,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
