"""Fuzz for as long as asked: `python tests/fuzz/soak.py --minutes 60 [--stage coordinator ...]`.

Each kind of process gets its share of the time in turn. The last line is JSON: cases and messages played, virtual
hours they covered, resident memory at the start (after a warm-up) and at the end, defects. A failing case is shrunk
and kept under `corpus/`, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import coordinator_stage, learner_stage, node_stage, stage, wire_stage
from fuzz.case import Case
from hypothesis import HealthCheck, Phase, given, seed, settings

ROUND_CASES = 100
"""Cases between two looks at the clock and at the memory."""

WARM_UP_ROUNDS = 2
"""Rounds of a stage before its memory is taken for the start: caches fill first."""

STRATEGIES = {
    "coordinator": coordinator_stage.cases,
    "confused-learner": lambda: coordinator_stage.cases(("learner",)),
    "node": node_stage.cases,
    "learner": learner_stage.cases,
    "wire": wire_stage.cases,
}


def main() -> int:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--stage", choices=sorted(STRATEGIES), action="append")
    chosen = options.parse_args()
    names = chosen.stage or sorted(STRATEGIES)
    report = {"cases": Counter(), "messages": Counter(), "virtual_hours": 0.0, "rss_mb": {}, "defects": []}
    for name in names:
        _soak(name, time.monotonic() + 60 * chosen.minutes / len(names), report)
    print(json.dumps(report | {"total_cases": sum(report["cases"].values()), "stages": names}))
    return 1 if report["defects"] else 0


def _soak(name: str, until: float, report: dict[str, Any]) -> None:
    if name != "wire":
        modules = {"confused-learner": coordinator_stage, "coordinator": coordinator_stage}
        module = modules.get(name) or {"node": node_stage, "learner": learner_stage}[name]
        _rounds(name, module.play, _own_resident_bytes, until, report)
        return
    try:
        with wire_stage.target() as target:
            _rounds(name, target.play, target.resident_bytes, until, report)
    except stage.Defect as defect:
        report["defects"].append(f"{name}: {defect}")


def _rounds(
    name: str, play: Callable[[Case], None], resident_bytes: Callable[[], int], until: float, report: dict[str, Any]
) -> None:
    last: list[Case] = []

    @settings(
        max_examples=ROUND_CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(STRATEGIES[name]())
    def one(case: Case) -> None:
        last[:] = [case]
        report["cases"][name] += 1
        report["messages"][name] += len(case.steps)
        play(case)

    memory: list[int] = []
    while time.monotonic() < until:
        try:
            seed(secrets.randbits(64))(one)()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            path = last[0].keep("found")
            report["defects"].append(f"{name}: {type(error).__name__} {path.name}")
            print(f"{name}: {path}: {_innermost(error)!r}", file=sys.stderr, flush=True)
            if len(report["defects"]) > 10:
                return
        memory.append(resident_bytes())
        print(f"{name}: {report['cases'][name]} cases, {memory[-1] >> 20} MiB", file=sys.stderr, flush=True)
    report["virtual_hours"] = round(stage.VIRTUAL_SECONDS[0] / 3600, 1)
    start = memory[min(WARM_UP_ROUNDS, len(memory) - 1)]
    report["rss_mb"][name] = [start >> 20, memory[-1] >> 20]


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _own_resident_bytes() -> int:
    gc.collect()
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
