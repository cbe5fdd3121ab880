"""What the number format of snapshots does to learning: `python tests/bench/domains.py`. The last line is JSON.

The run of `staleness.py` at S = 3, kappa = 2 with the truncated ratio, three seeds, the sampler's weights as a snapshot
in f32, f16 (the default), bf16 or q8_0 holds them (`learner.quantise`; matrices only, vectors stay float32).

`kl_domain` is the price of the format alone: k3 of KL(sampler || the weights it was rounded from) over drawn tokens, in
nats a token. `kl` is what the learner sees, KL(sampler || learner), staleness included. Final and `ci95` as in
`staleness.py`. With its `--results FILE` the f32 runs are not made twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from tiny_loop import DEMO, PAINT, SEEDS_MAX, Setting, draw_curves, interval, run_all, step_mean

DOMAINS = ("f32", "f16", "bf16", "q8_0")
S = 3
SEEDS = 3
STEPS_QUICK = 8
PLOT = Path(__file__).with_name("plots") / "domains.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: shows that all parts work")
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=range(2, SEEDS_MAX + 1))
    parser.add_argument("--results", type=Path, help="a JSON file that keeps each run done")
    parser.add_argument("--minutes", type=float, help="stop before a run that would end later")
    parser.add_argument("--plot", type=Path, help=f"where the curves go; {PLOT.name} beside this file unless --quick")
    arguments = parser.parse_args()
    seeds, steps = (1, STEPS_QUICK) if arguments.quick else (arguments.seeds, DEMO.steps)
    settings = [Setting(S=S, seed=seed, domain=domain, steps=steps) for seed in range(seeds) for domain in DOMAINS]
    runs = run_all(settings, arguments.results, arguments.minutes)
    table, lines = {}, []
    for domain, colour in zip(DOMAINS, PAINT, strict=False):
        mine = [each for setting, each in runs.items() if setting.domain == domain]
        finals = [each["final"] for each in mine]
        table[domain] = {
            "final_mean": round(statistics.fmean(finals), 4),
            "ci95": interval(finals),
            "finals": [round(final, 4) for final in finals],
            "kl_domain": float(f"{step_mean(mine, 'domain_kl'):.2e}"),
            "kl_domain_max": float(f"{max(step['domain_kl'] for each in mine for step in each['steps']):.2e}"),
            "kl": round(step_mean(mine, "kl"), 4),
            "truncated_share": round(step_mean(mine, "truncated"), 4),
        }
        lines.append((domain, colour, mine))
    plot = arguments.plot or (None if arguments.quick else PLOT)
    if plot:
        draw_curves(plot, {f"snapshots by format, S = {S}": lines})
    print(json.dumps(table))


if __name__ == "__main__":
    main()
