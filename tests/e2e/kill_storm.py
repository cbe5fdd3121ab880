"""A kill storm: `python tests/e2e/kill_storm.py --kills 100 --seed N`.

Runs the demo's daemons again and again, `kill -9`s them and their helpers at moments drawn from the seed, restarts what
died as a supervisor would, and checks after each run that nothing was lost and nothing counted twice. The last line of
stdout is one JSON object; what happened is told on stderr. `--run I` repeats one run of a seed alone. Exit code 1 when
anything was wrong; the folder of such a run is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.storm_processes import adopt_orphans
from e2e.storm_run import StormRun
from e2e.storm_schedule import KILLS_MAX, plan_run

from echo2.coordinator.demo_process import child_environment, command

RUNS_FOR_NOTHING_MAX = 5
"""Runs in a row in which nothing could be killed: then something else is the matter."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def storm(arguments, out: Path) -> dict:
    model = out / "model"
    if not model.exists():
        prepare = command("echo2-learner", "prepare", "--model", "tiny", "--out", str(model))
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL, env=child_environment())  # noqa: ASYNC221
    adopt_orphans()
    began = trio.current_time()
    kills, phases, failures, missed = Counter(), Counter(), [], 0
    number, idle = arguments.run or 0, 0
    while True:
        left = arguments.kills - kills.total() if arguments.run is None or not arguments.kills else KILLS_MAX
        plan = plan_run(arguments.seed, number, left)
        say(f"run {number}: {plan.nodes} nodes, {plan.kills} kills")
        for strike in plan.strikes:
            say(f"  {strike}")
        folder = out / f"run-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        outcome = await StormRun(plan, model, folder, pace=arguments.pace, say=say, steps=arguments.steps).run()
        kills += outcome.kills
        phases += outcome.phases
        missed += outcome.missed
        idle = 0 if outcome.kills else idle + 1
        say(
            f"run {number}: {outcome.seconds:.0f} s, {outcome.kills.total()} kills ({kills.total()} in all), "
            f"{outcome.marks}, restarts {outcome.numbers.get('restarts')}, rollouts {outcome.numbers.get('rollouts')}"
        )
        for wrong in outcome.wrong:
            say(f"  WRONG: {wrong}")
        if outcome.wrong:
            failures.append({"seed": arguments.seed, "run": number, "wrong": outcome.wrong, "folder": str(folder)})
        elif not arguments.keep:
            shutil.rmtree(folder)
        number += 1
        if arguments.run is not None or kills.total() >= arguments.kills or idle >= RUNS_FOR_NOTHING_MAX:
            break
    return {
        "kills": kills.total(),
        "kills_by_kind": dict(sorted(kills.items())),
        "kills_by_phase": dict(phases),
        "kills_missed": missed,
        "runs": number - (arguments.run or 0),
        "failures": failures,
        "seed": arguments.seed,
        "seconds": round(trio.current_time() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many, over all runs; 0: one run in peace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, default=None, help="only this run of the seed")
    parser.add_argument("--steps", type=int, default=16, help="training steps of each run")
    parser.add_argument("--pace", type=float, default=1.0, help="stretches every time, for a busy machine")
    parser.add_argument("--out", type=Path, default=None, help="where the runs' folders go")
    parser.add_argument("--keep", action="store_true", help="keep the folders of good runs too")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="kill-storm-"))
    out.mkdir(parents=True, exist_ok=True)
    result = trio.run(storm, arguments, out.resolve())
    if arguments.out is None and not result["failures"] and not arguments.keep:
        shutil.rmtree(out)
    print(json.dumps(result), flush=True)
    short = arguments.run is None and result["kills"] < arguments.kills
    return 1 if result["failures"] or short else 0


if __name__ == "__main__":
    sys.exit(main())
