"""What staleness does to learning, the paper's figure 3b: `python tests/bench/staleness.py`. The last line is JSON.

The tiny model on `arithmetic`, 60 steps of 256 rollouts in groups of 8 (what `echo2 demo` does), in one process, at
S = 0, 3, 4, 6 and 11, five seeds each; who samples which step is in `tiny_loop`. Twice: with the ratio to the sampler
truncated at C = 2, our objective; and without it, w = 1, standard GRPO that takes stale rollouts for its own. At S = 0
the two are the same up to rounding, and run once.

Final: mean over the last versions of the exact probability that a held-out sum comes out right. `ci95`: of the mean
over the seeds, by Student's t. `reaches`: the interval includes synchronous - 5 % or lies above it; `all_above`: it
lies above. 45 runs of about 20 s on a free core; `--results FILE` keeps each one, so that `--minutes` may cut the work
into parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_loop import DEMO, PAINT, SEEDS_MAX, TOLERANCE, Setting, draw_curves, interval, run_all, step_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUDGETS = (0, 3, 4, 6, 11)
SEEDS = 5
WITH, WITHOUT = "truncated", "none"
QUICK: Mapping[str, Any] = {"budgets": (0, 3), "seeds": 1, "steps": 8}
PLOT = Path(__file__).with_name("plots") / "staleness.png"


def settings_of(budgets: Sequence[int], seeds: int, steps: int) -> list[Setting]:
    """With the ratio first, and seed by seed, so that whatever is done is comparable."""
    return [
        Setting(S=budget, seed=seed, ratio=ratio, steps=steps)
        for ratio in (WITH, WITHOUT)
        for seed in range(seeds)
        for budget in budgets
        if budget or ratio == WITH
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: shows that all parts work")
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=range(2, SEEDS_MAX + 1))
    parser.add_argument("--results", type=Path, help="a JSON file that keeps each run done")
    parser.add_argument("--minutes", type=float, help="stop before a run that would end later")
    parser.add_argument("--plot", type=Path, help=f"where the curves go; {PLOT.name} beside this file unless --quick")
    arguments = parser.parse_args()
    budgets = QUICK["budgets"] if arguments.quick else BUDGETS
    seeds, steps = (QUICK["seeds"], QUICK["steps"]) if arguments.quick else (arguments.seeds, DEMO.steps)
    runs = run_all(settings_of(budgets, seeds, steps), arguments.results, arguments.minutes)

    def of(budget: int, ratio: str) -> list[dict[str, Any]]:
        asked = ratio if budget else WITH
        return [runs[Setting(S=budget, seed=seed, ratio=asked, steps=steps)] for seed in range(seeds)]

    synchronous = statistics.fmean(each["final"] for each in of(0, WITH))
    wanted = (1 - TOLERANCE) * synchronous
    found: dict[str, dict[str, Any]] = {WITH: {}, WITHOUT: {}}
    for ratio, table in found.items():
        for budget in budgets:
            finals = [each["final"] for each in of(budget, ratio)]
            low, high = interval(finals)
            table[str(budget)] = {
                "final_mean": round(statistics.fmean(finals), 4),
                "ci95": [low, high],
                "reaches": high >= wanted,
                "all_above": low >= wanted,
                "finals": [round(final, 4) for final in finals],
                "staleness_mean": round(step_mean(of(budget, ratio), "staleness"), 2),
                "kl_mean": round(step_mean(of(budget, ratio), "kl"), 4),
                "truncated_share": round(step_mean(of(budget, ratio), "truncated"), 4),
            }
    plot = arguments.plot or (None if arguments.quick else PLOT)
    if plot:
        colours = dict(zip(budgets, PAINT, strict=False))
        panels = {
            title: [(f"S = {budget}", colours[budget], of(budget, ratio)) for budget in budgets]
            for title, ratio in (("ratio truncated at C = 2", WITH), ("without the ratio, w = 1", WITHOUT))
        }
        draw_curves(plot, panels, synchronous=synchronous)
    print(json.dumps({**found[WITH], "without": found[WITHOUT]}))


if __name__ == "__main__":
    main()
