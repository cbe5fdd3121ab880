"""Run files judged over REST: what `echo2 submit --dry-run` says of one, of the coordinator's own model and pool.

The file comes from a person far away, so two things are other than on the command line: it names no file of this
machine (the model is the coordinator's own, and a task that is Python is not loaded), and it is judged within bounds,
one at a time. Tasks of the catalogue are loaded in the scorer's confined worker, as for a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import trio

from echo2.p2p.errors import ConfigurationError, Refused
from echo2.p2p.settings import parse_toml
from echo2.tasks.catalog import is_sandbox_task, make_task, prompts_from_worker
from echo2.tasks.scorer import ScorerUnavailable, TaskUnusable, open_scorer

from .in_thread import in_thread
from .preview import seen_of
from .prompts import check_prompts
from .run_file import load_values
from .submit import UNKNOWN_PEER, Report, ask_learner, coordinator_config, learner_settings, report, resolve
from .task_loading import load_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from echo2.tasks.task import Task

    from .config import CoordinatorConfig, RunConfig
    from .preview import Seen
    from .prompts import FolderText
    from .run_file import Submission
    from .submit import LearnerCheck
    from .views import PoolView

T = TypeVar("T")

SOURCE = Path("the run file")
"""What errors call it."""

SECONDS_MAX = 25.0
"""Within `rest_server.READ_SECONDS`. A task that takes longer to load is judged on the command line."""

WAITING_MAX = 4

PYTHON_TASK = "file"


@dataclass(frozen=True, slots=True)
class Judged:
    """Why a run file is wrong, empty when it is not, and every key with its value and origin."""

    problem: str
    resolved: tuple[tuple[str, Any, str], ...] = ()


class Judge:
    """Judges by the coordinator's settings, with the tokeniser it has loaded."""

    def __init__(
        self,
        config: CoordinatorConfig,
        text: FolderText,
        pool: Callable[[], PoolView],
        *,
        check: LearnerCheck | None = None,
    ) -> None:
        self._config = config
        self._text = text
        self._pool = pool
        self._check: LearnerCheck = check or partial(ask_learner, seconds=SECONDS_MAX)
        self._turn = trio.CapacityLimiter(1)

    async def validate(self, content: str | Mapping[str, Any]) -> Judged:
        """Whether it is a run file, by all settings of coordinator and learner. Raises Refused when busy."""

        async def work() -> Judged:
            try:
                submission, learner = await self._read(content)
            except ConfigurationError as error:
                return Judged(str(error))
            return Judged("", resolve(submission, learner))

        return await self._in_turn(work)

    async def submission(self, content: str | Mapping[str, Any]) -> Submission:
        """A run file that a run can be made of. Raises ConfigurationError for one that is wrong, Refused when busy."""

        async def work() -> Submission:
            submission, _ = await self._read(content)
            if submission.file.run.learner == UNKNOWN_PEER:
                raise ConfigurationError(
                    f"{SOURCE} [run]: learner is missing: the peer id that `echo2-learner identity` prints, where the "
                    "run is to be trained"
                )
            if submission.file.coordinator:
                raise ConfigurationError(
                    f"{SOURCE} [coordinator]: leave it out: this coordinator has its settings already"
                )
            return submission

        return await self._in_turn(work)

    async def estimate(self, content: str | Mapping[str, Any]) -> Report:
        """What the run would be. Raises ConfigurationError for a file that is wrong, Refused when busy."""

        async def work() -> Report:
            submission, learner = await self._read(content)
            seen = await self._look(submission.file.run)
            try:
                return report(submission, learner, seen, self._pool())
            except ArithmeticError as error:
                said = "its numbers are too large or too small for a forecast"
                raise ConfigurationError(f"{SOURCE} [forecast]: {said} ({error})") from error

        return await self._in_turn(work)

    async def _in_turn(self, work: Callable[[], Awaitable[T]]) -> T:
        """One at a time, a few waiting, each within SECONDS_MAX. Raises Refused."""
        if self._turn.statistics().tasks_waiting >= WAITING_MAX:
            raise Refused("busy", "other run files are being judged", 5.0)
        with trio.move_on_after(SECONDS_MAX):
            async with self._turn:
                return await work()
        said = "that takes longer than an answer may; judge it on a machine of yours: echo2 submit --dry-run"
        raise Refused("busy", said, 30.0)

    async def _read(self, content: str | Mapping[str, Any]) -> tuple[Submission, Mapping[str, Any]]:
        values = parse_toml(content, SOURCE, "run file") if isinstance(content, str) else dict(content)
        submission = load_values(self._own_files_only(values), SOURCE, learner=UNKNOWN_PEER)
        coordinator_config(submission)
        make = partial(make_task, submission.file.run.spec)
        try:
            await in_thread(make)
        except ValueError as error:
            raise ConfigurationError(f"{SOURCE} [run]: {error}") from error
        learner = learner_settings(submission, coordinator=f"/ip4/127.0.0.1/tcp/1/p2p/{UNKNOWN_PEER}")
        # Cancelled, the thread goes on until the program it waits for has ended, which takes no longer than that.
        return submission, await in_thread(partial(self._check, learner, str(SOURCE)))

    def _own_files_only(self, values: dict[str, Any]) -> dict[str, Any]:
        """With the coordinator's model folder. Raises ConfigurationError for a file of its own."""
        run = values.get("run")
        if not isinstance(run, dict):
            return values  # the schema says what is missing
        own = str(self._config.run.model_dir)
        if run.get("model_dir", own) != own:
            raise ConfigurationError(
                f"{SOURCE} [run]: leave model_dir out: over REST a run is judged with the coordinator's own model"
            )
        options = run.get("task_options")
        if run.get("task") == PYTHON_TASK or (isinstance(options, dict) and options.get("path") is not None):
            raise ConfigurationError(
                f"{SOURCE} [run]: over REST a task has no file of its own, Python or data; judge it where the file is: "
                "echo2 submit --dry-run"
            )
        return {**values, "run": {**run, "model_dir": own}}

    async def _look(self, run: RunConfig) -> Seen:
        try:
            if not prompts_from_worker(run.spec):
                task = make_task(run.spec)
                if not is_sandbox_task(task):
                    check = partial(check_prompts, cast("Task", task), self._text)
                    await in_thread(check)
            async with open_scorer(run.spec) as scorer:
                return await seen_of(run, await load_task(run, scorer, self._text), self._text, scorer)
        except TaskUnusable as error:
            raise ConfigurationError(f"{SOURCE} [run]: {error}") from error
        except ScorerUnavailable as error:
            raise Refused("scorer_unavailable", f"the scorer cannot be started: {error}", None) from error
