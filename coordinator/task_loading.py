"""A run's task as the coordinator holds it, and whether the run's model can read it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.catalog import is_sandbox_task, make_task, prompts_from_worker
from echo2.tasks.materialised import materialise
from echo2.tasks.sandbox import SEED_BYTES
from echo2.tasks.scorer import PlayItem

from .prompts import FolderText, check_prompts, check_readable

if TYPE_CHECKING:
    from echo2.tasks.sandbox import SandboxTask
    from echo2.tasks.scorer import ProcessScorer
    from echo2.tasks.task import Task

    from .config import RunConfig


def check_task(run: RunConfig) -> None:
    """What can be found wrong before anything is started. Raises ConfigurationError."""
    text = FolderText(run.model_dir)
    try:
        task = make_task(run.spec)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if not is_sandbox_task(task) and not prompts_from_worker(run.spec):
        check_prompts(cast("Task", task), text)


async def load_task(run: RunConfig, scorer: ProcessScorer, text: FolderText) -> Task | SandboxTask:
    """The run's task as the coordinator holds it; what only the scorer's process can say of it was checked.

    Raises ConfigurationError and ScorerUnavailable.
    """
    spec = run.spec
    try:
        task = await materialise(scorer, spec)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if not is_sandbox_task(task):
        if prompts_from_worker(spec):
            check_prompts(cast("Task", task), text)
        return task
    seeds = [hashlib.blake2b(b"check", key=bytes([number]), digest_size=SEED_BYTES).digest() for number in range(8)]
    for number, play in enumerate(await scorer.play([PlayItem(spec, seed) for seed in seeds])):
        if play.reason or play.done:
            raise ConfigurationError(f"the environment {spec} does not begin: {play.reason or 'it is over at once'}")
        check_readable(spec.name, f"opening {number}", play.observations[0], text)
    return task
