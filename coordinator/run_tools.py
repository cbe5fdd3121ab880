"""What runs work with in a coordinator's process: each has a scorer's process, its task and its model's tokeniser."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.scorer import ScorerUnavailable, TaskUnusable, open_scorer

from .opening import RunTools
from .prompts import FolderText
from .task_loading import check_task, load_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AsyncExitStack

    from .config import RunConfig

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_tools(run: RunConfig, *, item_seconds: float) -> AsyncIterator[RunTools]:
    """A run's tools, its task checked; no process is left behind. Raises ConfigurationError."""
    try:
        async with open_scorer(run.spec, item_seconds=item_seconds) as scorer:
            text = FolderText(run.model_dir)
            yield RunTools(scorer, await load_task(run, scorer, text), text)
    except TaskUnusable as error:
        raise ConfigurationError(str(error)) from error
    except ScorerUnavailable as error:
        raise ConfigurationError(f"the scorer cannot be started: {error}") from error


async def open_each(
    stack: AsyncExitStack, runs: Iterable[RunConfig], *, item_seconds: float, may_fail: bool = False
) -> dict[str, RunTools]:
    """The tools of several runs, by name, until the stack is closed. Raises ConfigurationError, unless one that fails
    is only left out: that of a run created long ago, whose task is gone, must not keep the others from being served."""
    found: dict[str, RunTools] = {}
    for run in runs:
        try:
            if may_fail:
                check_task(run)
            found[run.name] = await stack.enter_async_context(open_tools(run, item_seconds=item_seconds))
        except ConfigurationError as error:
            if not may_fail:
                raise
            log.warning("the run %s is not served: %s", run.name, error)
    return found
