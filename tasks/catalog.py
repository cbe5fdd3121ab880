"""Every task a run can name, and how a task is made from its name and options.

A task is a class here: the parameters of its constructor are its options. Making one checks the options and imports
nothing heavy: that is for `prepare` (`task.Prepared`), which only the scorer's worker calls.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from .arithmetic import Arithmetic
from .task import TaskSpec
from .word_problems import WordProblems

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from .sandbox import SandboxTask
    from .task import Task

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in (Arithmetic(), WordProblems())})
"""Those that are made already: no options, nothing to load."""

CLASSES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # name: module of this package, class; imported when a run names it
        "arithmetic": ("arithmetic", "Arithmetic"),
        "word-problems": ("word_problems", "WordProblems"),
        "math": ("math_problems", "MathProblems"),
        "reasoning_gym": ("reasoning_gym_task", "ReasoningGymTask"),
        "file": ("file_task", "FileTask"),
        "poker": ("poker", "Poker"),
        "race": ("race", "Race"),
    }
)

SANDBOXES = frozenset({"poker", "race"})
"""Tasks of several turns that a node plays itself when a lease names them. None of them opens a file."""

IN_WORKER_ONLY = frozenset({"reasoning_gym", "file"})
"""Tasks whose prompts, too, come from the worker: the coordinator imports neither that library nor a person's file."""


def get_task(name: str) -> Task:
    """The single-turn task called `name`, without options. Raises ValueError, fit to show a person."""
    task = make_task(TaskSpec(name)) if name in CLASSES else _unknown(name)
    if is_sandbox_task(task):
        raise ValueError(f"the task {name!r} is played over several turns")
    return cast("Task", task)


def make_task(spec: TaskSpec | str) -> Task | SandboxTask:
    """The task that `spec` describes.

    Raises ValueError, fit to show a person, for an unknown name or option, with a suggestion, and a value that the
    task does not take.
    """
    spec = TaskSpec.of(spec)
    if spec.name not in CLASSES:
        _unknown(spec.name)
    if spec.name in TASKS and not spec.options:
        return TASKS[spec.name]
    module, class_name = CLASSES[spec.name]
    kind = getattr(importlib.import_module(f".{module}", __package__), class_name)
    parameters = inspect.signature(kind).parameters
    for option in spec.options:
        if option not in parameters:
            known = f"its options: {', '.join(sorted(parameters))}" if parameters else "it has none"
            raise ValueError(
                f"the task {spec.name!r} has no option {option[:64]!r}{suggestion(option, parameters)} ({known})"
            )
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in spec.options:
            raise ValueError(f"the task {spec.name!r} needs the option {option!r}")
    try:
        return cast("Task | SandboxTask", kind(**spec.options))
    except ValueError as error:
        raise ValueError(f"the task {spec.name!r}: {error}") from error


def with_absolute_path(spec: TaskSpec, folder: Path) -> TaskSpec:
    """`spec` with its option `path`, where it has one, taken from `folder`: settings name files from their own."""
    path = spec.options.get("path")
    if not isinstance(path, str):
        return spec
    return TaskSpec(spec.name, {**spec.options, "path": str((folder / path).absolute())})


def is_sandbox_task(task: object) -> bool:
    """True for a task that is played over several turns."""
    return hasattr(task, "sandbox")


def prompts_from_worker(spec: TaskSpec) -> bool:
    """True when only the worker can say the task's prompts (`materialised.materialise`)."""
    return spec.name in IN_WORKER_ONLY


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _unknown(name: str) -> Any:
    hint = suggestion(name, CLASSES) or "."
    raise ValueError(f"there is no task {name[:64]!r}{hint} Known tasks: {', '.join(sorted(CLASSES))}.")
