"""Runs a script under a sampling profiler of its CPU time: `python sampled.py OUT SCRIPT ARGUMENTS...`.

Every other millisecond of CPU time the stack of the running line is counted. Every ten seconds, and at its end, `OUT`
says where the time went: self time by function, and cumulative time by function, in per cent.
"""

from __future__ import annotations

import runpy
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

SECONDS_EACH = 0.002
WRITE_SECONDS = 10.0
LINES = 90

own: Counter[str] = Counter()
within: Counter[str] = Counter()
written_at = time.monotonic()


def name_of(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_qualname}"


def sample(_number: int, frame: FrameType | None) -> None:
    global written_at
    names = []
    while frame is not None:
        names.append(name_of(frame))
        frame = frame.f_back
    own[names[0]] += 1
    within.update(set(names))
    if time.monotonic() - written_at > WRITE_SECONDS:
        signal.setitimer(signal.ITIMER_PROF, 0)  # or the next sample would come in the midst of writing
        write()
        written_at = time.monotonic()
        signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH, SECONDS_EACH)


def write() -> None:
    total = own.total()
    with Path(OUT).open("w", encoding="utf-8") as file:
        for title, counts in (("own", own), ("within", within)):
            file.write(f"{title}, of {total} samples\n")
            for name, count in counts.most_common(LINES):
                file.write(f"{100 * count / total:6.2f} {name}\n")


OUT = sys.argv[1]
if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH, SECONDS_EACH)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        write()
