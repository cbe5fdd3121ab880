"""Fuzz for as long as asked: `python tests/fuzz/soak.py --minutes 60 [--stage coordinator ...] [--seed 1]`.

The stages take turns, each time against a new world that lives for thousands of cases; the process behind `wire` lives
throughout. One case is one hostile input given to one handler (a request, or a reply in place of the honest one; a
connection or a run of frames, of the raw ones). Beside every case, or between two of them, an honest peer asks
something small, and each hundred cases the honest must get on with their work and nothing may have stayed behind.

The last line is JSON: cases by stage and protocol, failures by class, the bound on hangs and the slowest case, virtual
hours, and resident memory, file handles and tasks after a tenth of the time and at the end. A failing case is shrunk
and kept under `corpus/` with its class of failure. The exit code is 1 if there was one or if memory was not flat.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import resource
import secrets
import sys
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import source, stage, wire_bytes, wire_stage
from fuzz.case import Case
from fuzz.shrink import shrunk_apart
from fuzz.stages import STAGES

MEMORY_BYTES_MAX = 4 << 30
"""Of address space: what eats memory fails as MemoryError, which is a defect, before the machine is in trouble."""

FLAT_SHARE, FLAT_BYTES = 0.10, 24 << 20
"""Resident memory at the end may be above that after a tenth of the time by the greater of these two: the allocator
keeps what the largest world so far has taken, and worlds differ."""

TURN_CASES = 2000
"""Of one stage, before the next has its turn; fewer where a world bears fewer."""

WIRE_TOGETHER, WIRE_ROUNDS = 16, 30
"""Hostile connections at a time, and times in one turn."""

FAILURES_MAX = 20
"""Then something is broken altogether."""


class Soak:
    """The state of one run."""

    def __init__(self, names: list[str], seed: int, target: wire_stage.Target | None) -> None:
        self.cases: dict[str, Counter[str]] = defaultdict(Counter)
        self.failures: list[str] = []
        self.seconds: Counter[str] = Counter()
        self._names = names
        self._rng = random.Random(seed)
        self._target = target

    def run(self, seconds: float) -> dict[str, Any]:
        """Turns until the time is over; returns what was measured after a tenth of it and at the end."""
        began = time.monotonic()
        early: dict[str, Any] = {}
        while len(self.failures) < FAILURES_MAX:
            for name in self._names:
                started = time.process_time()
                (self._wire if name == "wire" else self._turn)(name)
                self.seconds[name] += time.process_time() - started
                print(
                    f"{time.monotonic() - began:.0f} s {name}: {self.cases[name].total()}", file=sys.stderr, flush=True
                )
                if time.monotonic() - began >= seconds:
                    break
            if not early and time.monotonic() - began >= seconds / 10:
                early = self._measured()
            if time.monotonic() - began >= seconds:
                break
        return {"at_tenth": early or self._measured(), "at_end": self._measured()}

    def _turn(self, name: str) -> None:
        module, made = STAGES[name], []
        seed = self._rng.getrandbits(64)
        try:
            module.soak(name, random.Random(seed), min(TURN_CASES, module.WORLD_CASES[name]), made)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._failed(name, seed, made[0], error)
        self.cases[name] += made[0].cases

    def _failed(self, name: str, seed: int, found: source.Fresh, error: BaseException) -> None:
        failure, inner = source.failure_of(error)
        module = STAGES[name]
        case = shrunk_apart(module.NAME, module.play, found.history, failure, found.scheduler)
        kept = f"seed {seed}: not repeated by its {len(found.history)} steps alone"
        if case is not None:
            kept = case.keep(case.failure).name
        self.failures.append(f"{name}: {failure}: {kept}")
        print(
            f"{name}: seed {seed}: {failure}: {inner!r} from {_place(inner.__cause__)}: {kept}",
            file=sys.stderr,
            flush=True,
        )

    def _wire(self, name: str) -> None:
        assert self._target is not None
        for _ in range(WIRE_ROUNDS):
            steps = [wire_bytes.draw(self._rng) for _ in range(WIRE_TOGETHER)]
            try:
                self._target.play_together(steps)
            except source.Defect as defect:
                case = Case("wire", tuple(steps), defect.failure).keep(defect.failure).name  # not shrunk: it was all
                self.failures.append(f"wire: {defect.failure}: {case}")
                print(f"wire: {defect}: {case}", file=sys.stderr, flush=True)
                return
            self.cases[name].update(step.role for step in steps)

    def _measured(self) -> dict[str, Any]:
        gc.collect()
        if sys.platform == "linux":  # what was freed is given back: else the allocator's habits are measured
            ctypes.CDLL(None).malloc_trim(0)
        text = Path("/proc/self/status").read_text()
        found = {
            "cases": sum(each.total() for each in self.cases.values()),
            "rss_mib": int(text.partition("VmRSS:")[2].split()[0]) / 1024,
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "objects": len(gc.get_objects()),
            "tasks": dict(stage.TASKS),
        }
        if self._target is not None:
            self._target.settle(*self._target.idle)
            found["wire_rss_mib"] = self._target.resident_bytes() / (1 << 20)
            found["wire_files"] = self._target.files()
            found["wire_tasks"] = self._target.ask("report")
        return found


def _place(error: BaseException | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:] if error is not None else []
    return f"{error!r} at " + ", ".join(f"{Path(one.filename).name}:{one.lineno}" for one in frames)


def flat(early: float, late: float) -> bool:
    """Whether resident memory (MiB) has not grown."""
    return late <= early + max(FLAT_SHARE * early, FLAT_BYTES / (1 << 20))


def main() -> int:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--stage", choices=[*STAGES, "wire"], action="append")
    options.add_argument("--seed", type=int, default=secrets.randbits(32))
    chosen = options.parse_args()
    names = chosen.stage or [*STAGES, "wire"]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    began = time.monotonic()
    target = wire_stage.Target() if "wire" in names else None
    soak = Soak(names, chosen.seed, target)
    try:
        measured = soak.run(60 * chosen.minutes)
    finally:
        said = target.close() if target is not None else ""
    if said:
        soak.failures.append(f"wire: exception: {said[-2000:]}")
    early, late = measured["at_tenth"], measured["at_end"]
    is_flat = all(flat(early[name], late[name]) for name in early if name.endswith("rss_mib"))
    total = sum(each.total() for each in soak.cases.values())
    report = {
        "seed": chosen.seed,
        "minutes": round((time.monotonic() - began) / 60, 2),
        "total_cases": total,
        "cases_per_second": round(total / (time.monotonic() - began), 1),
        "cases": {name: {"total": each.total(), **each} for name, each in soak.cases.items()},
        "processor_seconds": {name: round(each) for name, each in soak.seconds.items()},
        "virtual_hours": round(stage.VIRTUAL_SECONDS[0] / 3600, 1),
        "failures": soak.failures,
        "crashes": sum(": hang: " not in failure for failure in soak.failures),
        "hangs": sum(": hang: " in failure for failure in soak.failures),
        "hang_bound_seconds": {"in_memory_processor": source.HANG_SECONDS, "wire": wire_stage.HANG_SECONDS},
        "slowest_case_seconds": round(source.WATCH.slowest_seconds, 3),
        "slowest_case": source.WATCH.slowest.protocol if source.WATCH.slowest else "",
        "memory_flat": is_flat,
        "memory_margin": f"the greater of {FLAT_SHARE:.0%} and {FLAT_BYTES >> 20} MiB",
        **measured,
    }
    print(json.dumps(report))
    return 1 if soak.failures or not is_flat else 0


if __name__ == "__main__":
    sys.exit(main())
