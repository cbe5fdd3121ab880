"""Virtual time that repeats: trio's clock jumps, and its scheduler draws from a seed."""

import random

import trio
import trio._core._run as trio_run
import trio.testing


def run_pinned(main, *, seed):
    """`trio.run(main)` under MockClock with the order of runnable tasks drawn from `seed`.

    trio shuffles each batch of tasks with a private generator, and with hash order before that unless told otherwise;
    both are private names, so `test_pinned.py` fails when they cease to do this.
    """
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r = True, random.Random(seed)
    try:
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r = before
