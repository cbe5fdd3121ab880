"""From the long history of a failure to the few steps that do it again."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence

from fuzz.case import Case, Step
from fuzz.source import failure_of

SHRINK_SECONDS = 120.0
"""For all tries together: a long case is kept rather than the soak held up."""


def shrunk(
    stage: str, play: Callable[[Case], None], history: Sequence[Step], failure: str, scheduler: int
) -> Case | None:
    """The shortest case found that fails (delta debugging), None when the whole history does not fail again."""
    ends = time.monotonic() + SHRINK_SECONDS

    def fails(steps: Sequence[Step]) -> bool:
        try:
            play(Case(stage, tuple(steps), scheduler=scheduler))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return failure_of(error)[0] == failure
        return False

    steps = list(history)
    for tail in (1, 8, 64, len(steps)):  # mostly it was the last one
        if fails(steps[-tail:]):
            steps = steps[-tail:]
            break
    else:
        return None
    size = len(steps) // 2
    while size and time.monotonic() < ends:
        at = 0
        while at < len(steps) and time.monotonic() < ends:
            rest = steps[:at] + steps[at + size :]
            if rest and fails(rest):
                steps = rest
            else:
                at += size
        size //= 2
    return Case(stage, tuple(steps), failure, scheduler)


def shrunk_apart(
    stage: str, play: Callable[[Case], None], history: Sequence[Step], failure: str, scheduler: int
) -> Case | None:
    """`shrunk` in a process of its own: what failing runs leave behind is not this process's memory, or its alarm."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=_put, args=(answer, stage, play, tuple(history), failure, scheduler), daemon=True)
    child.start()
    try:
        found: Case | None = answer.get(timeout=10 * SHRINK_SECONDS)
    except queue.Empty:
        return None
    finally:
        child.kill()
        child.join()
        child.close()
    return found


def _put(answer: multiprocessing.Queue[Case | None], *arguments: object) -> None:
    answer.put(shrunk(*arguments))  # type: ignore[arg-type]
