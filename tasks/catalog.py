"""Every task a run can name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from .arithmetic import Arithmetic
from .word_problems import WordProblems

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .task import Task

TASKS: Mapping[str, Task] = {task.name: task for task in (Arithmetic(), WordProblems())}


def get_task(name: str) -> Task:
    """The task called `name`. Raises ValueError, fit to show a person, when there is none."""
    task = TASKS.get(name)
    if task is None:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no task {name[:64]!r}{hint} Known tasks: {', '.join(sorted(TASKS))}.")
    return task
