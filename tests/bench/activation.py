"""The activation loop after a loss, over many seeds, by how many nodes work: `python tests/bench/activation.py`.

Virtual time, one process, no network: a few seconds of CPU for each pool. A third of the nodes that work, and of those
that stand by, goes at a moment within a period; what is looked at is the true mu_pool, snapshots to fetch included.

| column      | meaning                                                                                      |
|-------------|----------------------------------------------------------------------------------------------|
| working     | nodes that worked before the loss, median                                                    |
| back        | periods from the loss until mu_pool is above mu_min again: mean, 95th percentile, worst      |
| late        | pools that took more than three periods                                                      |
| below       | share of the time between three and twelve periods after the loss in which it is below       |
| minds       | most changes of one node within ten periods                                                  |
| cost        | over the optimum for mu_target, before the loss, mean                                        |
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim.scheduler_world import World
from sim.test_scheduler import lose_a_third, periods_until_back, settled, share_below

POOLS = ((6, 3.0), (9, 4.0), (12, 5.0), (12, 3.0), (18, 3.0), (36, 3.0), (72, 2.0))
"""Nodes, and the whole pool's rate over mu_min: the fewer work, the more one node's noise and loss weigh."""


def measured(nodes: int, supply: float, noise: float, seeds: int) -> str:
    """A line of the table."""
    back, below, minds, cost, working = [], [], [], [], []
    for seed in range(seeds):
        world: World = settled(seed, nodes=nodes, supply=supply, noise=noise)
        cost.append(world.price() / world.optimum(world.rules.gamma * world.mu_min) - 1)
        working.append(len(world.state.assigned))
        left_at = lose_a_third(world)
        back.append(periods_until_back(world, world.true_mu, left_at))
        below.append(share_below(world, left_at + 3 * world.rules.period_seconds))
        minds.append(world.changes_within(10))
    back.sort()
    late = sum(each > 3 for each in back)
    return (
        f"| {nodes:3} x {supply:.0f} | {noise:4.0%} | {statistics.median(working):4.0f} "
        f"| {statistics.mean(back):5.2f}, "
        f"{back[int(0.95 * (seeds - 1))]:5.2f}, {back[-1]:5.2f} | {late:2}/{seeds} | {statistics.mean(below):6.2%} "
        f"| {max(minds)} | {statistics.mean(cost):6.1%} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--nodes", type=int, help="only pools of so many")
    options = parser.parse_args()
    print("| pool | noise | working | back: mean, p95, worst | late | below | minds | cost |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for nodes, supply in POOLS:
        if options.nodes in {None, nodes}:
            for noise in (0.0, 0.2):
                print(measured(nodes, supply, noise, options.seeds), flush=True)


if __name__ == "__main__":
    main()
