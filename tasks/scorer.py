"""Rewards, computed where a hostile response can do no harm (DESIGN section 9).

`open_scorer` runs one worker process (`scorer_worker`) that has no keys, no network and little of anything else; an
item that takes too long or crashes it costs that item its reward, and nobody else. `InlineScorer` calls the tasks
directly: for virtual time, and only with tasks that are trusted. One contract suite: `tests/contract/test_scorer.py`.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import trio

from . import bubblewrap
from .catalog import TASKS, make_task, prompts_from_worker
from .confinement import CPU_SECONDS_MAX
from .sandbox import SEED_BYTES, TURNS_MAX
from .scorer_process import TaskStopsWorker, Worker, WorkerLost
from .scorer_wire import (
    SAMPLES_MAX,
    Play,
    PlayItem,
    ScoreItem,
    TaskSizes,
    checked_play,
    checked_score,
    failed_play,
    plain_text,
    reward_trouble,
)
from .scorer_worker import evaluate, play
from .task import Prompt, Score, TaskSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from .sandbox import SandboxTask
    from .task import Split, Task

__all__ = [
    "InlineScorer",
    "Play",
    "PlayItem",
    "ProcessScorer",
    "ScoreItem",
    "Scorer",
    "ScorerUnavailable",
    "TaskSizes",
    "TaskUnusable",
    "open_scorer",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

ITEM_SECONDS_MAX = 2.0
"""A reward takes milliseconds; an attack on the scorer takes for ever. Wall clock, judged by this side."""

PROMPT_SECONDS_MAX = 20.0
"""For one prompt, made before a run starts from nothing that a stranger sent: some puzzles are slow to make."""

RESPONSE_BYTES_MAX = 1 << 20
"""Longer than any response within the wire's bound on tokens that is not padding; scored 0 unread."""

BATCH_ITEMS_MAX = 256
BATCH_BYTES_MAX = 4 << 20
"""One frame to the worker. What bounds the memory of both sides."""

START_ATTEMPTS = 5
START_BACKOFF_SECONDS = 0.5

WORKER_ITEMS_MAX = 50_000
"""After so many a fresh worker: bounds what a leaking scorer library holds."""

WORKER_BUSY_SECONDS_MAX = CPU_SECONDS_MAX / 2
"""After so long at work a fresh worker: its CPU allowance is never used up, however slow its puzzles are to make."""

SPECS_MAX = 8
"""Tasks one worker knows; those used last. A run has one, so this is about tests and about changing over."""


class ScorerUnavailable(Exception):
    """No worker could be started, through no fault of any response. Try again later; nothing was scored."""


class TaskStopsScorer(ScorerUnavailable):
    """No worker gets ready for a task of its own doing: it hangs as it is loaded, or ends its process when tried."""


class TaskUnusable(ValueError):
    """The worker could not load the task, or the task gave no usable prompt. Fit to show a person."""


class Scorer(Protocol):
    """Turns responses into rewards, and episodes' actions into what came of them."""

    @property
    def confinement(self) -> tuple[str, ...]:
        """Layers that hold around the scorer (`confinement`); empty when it runs in this process."""

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One finite score an item, in order. Never raises for what an item holds; may raise ScorerUnavailable."""

    async def play(self, items: Sequence[PlayItem]) -> list[Play]:
        """One play an item, in order, each from its seed. Never raises for what an item holds; as `score`."""


class InlineScorer:
    """Scores in this process, at once: nothing bounds the time or reach of a task.

    `tasks` go by their names, whatever options an item names; other specs are made by the catalogue.
    """

    confinement: tuple[str, ...] = ()

    def __init__(self, tasks: Mapping[str, Task | SandboxTask] = TASKS) -> None:
        self._tasks = tasks

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """As `Scorer.score`."""
        await trio.lowlevel.checkpoint()
        return [self._score_one(item) for item in items]

    async def play(self, items: Sequence[PlayItem]) -> list[Play]:
        """As `Scorer.play`."""
        await trio.lowlevel.checkpoint()
        return [self._play_one(item) for item in items]

    def _score_one(self, item: ScoreItem) -> Score:
        if trouble := _score_trouble(item):
            return Score(0.0, trouble)
        task = self._task(item.task)
        return evaluate(task, item.split, item.index, item.response) if not isinstance(task, str) else Score(0.0, task)

    def _play_one(self, item: PlayItem) -> Play:
        if trouble := _play_trouble(item):
            return failed_play(trouble)
        task = self._task(item.task)
        if isinstance(task, str):
            return failed_play(task)
        return play(task, item.seed, item.actions, truncated=item.truncated)

    def _task(self, named: TaskSpec | str) -> Any:
        """The task, or why there is none."""
        name = named if isinstance(named, str) else named.name
        try:
            return self._tasks[name] if name in self._tasks else make_task(named)
        except ValueError as error:
            return plain_text("", error)


@dataclass(frozen=True, slots=True)
class _Operation(Generic[T]):
    """One of the worker's operations: what a reply means, and what an item is worth that got none."""

    name: str
    seconds: float
    read: Callable[[Any], T]
    fail: Callable[[str], T]


@dataclass(frozen=True, slots=True)
class _Request:
    """An item as it is sent; `trouble` is why it is not."""

    spec: TaskSpec | None
    arguments: tuple[Any, ...]
    bytes_: int = 0
    trouble: str = ""


@asynccontextmanager
async def open_scorer(
    *specs: TaskSpec | str,
    item_seconds: float = ITEM_SECONDS_MAX,
    wrap: bool | None = None,
    hash_seed: int = 0,
) -> AsyncIterator[ProcessScorer]:
    """A scorer with its worker running and `specs` loaded; it leaves no process behind.

    Another task that an item names is loaded when it comes, in a fresh worker. Raises ScorerUnavailable when no worker
    starts and TaskUnusable when one of `specs` does not load, or hangs. `wrap`: run it under bubblewrap; unless set,
    where that works and a task is a person's own file. `hash_seed` orders Python's sets: `echo2 task check` tries two.
    """
    scorer = ProcessScorer([TaskSpec.of(spec) for spec in specs], item_seconds, wrap, hash_seed)
    try:
        try:
            await scorer.start()
        except TaskStopsScorer as error:
            raise TaskUnusable(str(error)) from error
        for spec in scorer.specs:
            if trouble := scorer.trouble(spec):
                raise TaskUnusable(trouble)
        yield scorer
    finally:
        await scorer.close()


class ProcessScorer:
    """One worker process at a time, restarted when it dies, hangs or has done enough. Made by `open_scorer`."""

    def __init__(self, specs: Sequence[TaskSpec], item_seconds: float, wrap: bool | None, hash_seed: int) -> None:
        self.confinement: tuple[str, ...] = ()
        self.specs = tuple(dict.fromkeys(specs))
        self._score = _Operation("score", item_seconds, _read_score, lambda reason: Score(0.0, reason))
        self._play = _Operation("play", item_seconds, checked_play, failed_play)
        self._wrap = wrap
        self._hash_seed = hash_seed
        self._turn = trio.Lock()  # the pipe carries one batch at a time
        self._worker: Worker | None = None
        self._items_done = 0
        self._busy_seconds = 0.0

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """As `Scorer.score`. Cancelling it kills the worker; the next call starts another."""
        return await self._ask(self._score, [_score_request(item) for item in items])

    async def play(self, items: Sequence[PlayItem]) -> list[Play]:
        """As `Scorer.play`. Cancelling it kills the worker; the next call starts another."""
        return await self._ask(self._play, [_play_request(item) for item in items])

    async def sizes(self, spec: TaskSpec) -> TaskSizes:
        """How many prompts the task has. Raises TaskUnusable, ScorerUnavailable."""
        operation: _Operation[TaskSizes] = _Operation("sizes", PROMPT_SECONDS_MAX, _read_sizes, _refuse)
        [sizes] = await self._ask(operation, [_Request(spec, ())])
        return sizes

    async def prompts(self, spec: TaskSpec, split: Split, first: int, count: int) -> list[Prompt]:
        """Prompts first ... first + count - 1 of a single-turn task. Raises TaskUnusable, ScorerUnavailable."""
        operation: _Operation[tuple[str, str]] = _Operation("prompts", PROMPT_SECONDS_MAX, _read_prompt, _refuse)
        places = range(first, first + count)
        texts = await self._ask(operation, [_Request(spec, (split, index)) for index in places])
        return [Prompt(split, index, text, prefill) for index, (text, prefill) in zip(places, texts, strict=True)]

    async def samples(self, spec: TaskSpec, split: Split, index: int) -> list[tuple[str, float]]:
        """Responses of which the task itself says the reward; none from most. Raises as `prompts`."""
        operation: _Operation[list[tuple[str, float]]] = _Operation(
            "samples", PROMPT_SECONDS_MAX, _read_samples, _refuse
        )
        [pairs] = await self._ask(operation, [_Request(spec, (split, index))])
        return pairs

    def trouble(self, spec: TaskSpec) -> str:
        """Why the running worker could not load the task; nothing when it could, or was never asked to."""
        known = dict(zip(self.specs, self._worker.troubles if self._worker else (), strict=False))
        return known.get(spec, "")

    async def start(self) -> None:
        """Have a worker running. Raises ScorerUnavailable; at once where a task is to blame (TaskStopsScorer)."""
        said = ""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._worker = await Worker.start(self.specs, hash_seed=self._hash_seed, visible=self._visible())
            except TaskStopsWorker as error:
                raise TaskStopsScorer(str(error)) from error
            except (OSError, WorkerLost) as error:
                said = str(error)
                log.warning("no scorer process (attempt %d of %d): %s", attempt, START_ATTEMPTS, error)
                await trio.sleep(START_BACKOFF_SECONDS * attempt)
            else:
                self.confinement = self._worker.confinement
                self._items_done = 0
                self._busy_seconds = 0.0
                return
        raise ScorerUnavailable(f"a scorer process could not be started in {START_ATTEMPTS} attempts: {said}")

    async def close(self) -> None:
        """Kill the worker and wait for its end, even when cancelled."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()

    async def _ask(self, operation: _Operation[T], requests: Sequence[_Request]) -> list[T]:
        results: list[T] = []
        async with self._turn:
            while len(results) < len(requests):
                left = requests[len(results) : len(results) + BATCH_ITEMS_MAX]
                if left[0].trouble:
                    results.append(operation.fail(left[0].trouble))
                else:
                    results += await self._ask_batch(operation, _next_batch(left))
        return results

    async def _ask_batch(self, operation: _Operation[T], batch: Sequence[_Request]) -> list[T]:
        """Results; when an item loses the worker, only those up to it: the caller sends the rest again."""
        spec = batch[0].spec
        assert spec is not None
        known = self.specs
        if spec not in known:
            self.specs = (*known, spec)[-SPECS_MAX:]
            await self.close()
        worn = self._items_done >= WORKER_ITEMS_MAX or self._busy_seconds >= WORKER_BUSY_SECONDS_MAX
        if self._worker is None or worn:
            await self.close()
            try:
                await self.start()
            except TaskStopsScorer:
                self.specs = known  # a newcomer that hangs must not keep those that ran before from their worker
                raise
        assert self._worker is not None
        place = self.specs.index(spec)
        results: list[T] = []
        whole = False
        started = trio.current_time()
        try:
            if operation.name == "score" and prompts_from_worker(spec):
                await self._make_prompts(place, batch)
            with trio.fail_after(operation.seconds):
                await self._worker.send([operation.name, [[place, *request.arguments] for request in batch]])
            for _ in batch:
                reply = await self._worker.reply(operation.name, operation.seconds)
                results.append(operation.read(reply))  # not a comprehension: these are kept when one fails
            whole = True
        except (WorkerLost, trio.TooSlowError) as error:
            reason = str(error) or "the scorer did not take the batch"
            log.warning("%s failed: %s", operation.name, reason)
            results.append(operation.fail(reason))
        finally:
            self._items_done += len(results)
            self._busy_seconds += trio.current_time() - started
            if not whole:  # cancelled, hung or dead: replies still to come would be taken for those of other items
                await self.close()
        return results

    async def _make_prompts(self, place: int, batch: Sequence[_Request]) -> None:
        """Have the worker make, and keep, the prompts of a batch: some puzzles take longer to make than a response may
        take to be scored. Raises WorkerLost; a prompt's own trouble shows again with its score."""
        assert self._worker is not None
        prompts = list(dict.fromkeys(request.arguments[:2] for request in batch))
        await self._worker.send(["prompts", [[place, *prompt] for prompt in prompts]])
        for _ in prompts:
            await self._worker.reply("prompts", PROMPT_SECONDS_MAX)

    def _visible(self) -> list[Path] | None:
        """What the worker sees of people's files under bubblewrap; None without."""
        files = [Path(str(spec.options["path"])).absolute() for spec in self.specs if "path" in spec.options]
        own = any(spec.name == "file" for spec in self.specs)
        if self._wrap is False or (self._wrap is None and not own) or bubblewrap.missing():
            return None
        return [bubblewrap.folder_shown(file) for file in files]


def _next_batch(requests: Sequence[_Request]) -> list[_Request]:
    """As many of the leading requests as fit a frame and are about one task; at least one."""
    batch: list[_Request] = []
    bytes_ = 0
    for request in requests:
        bytes_ += request.bytes_
        if batch and (bytes_ > BATCH_BYTES_MAX or request.trouble or request.spec != batch[0].spec):
            break
        batch.append(request)
    return batch


def _score_request(item: ScoreItem) -> _Request:
    if trouble := _score_trouble(item):
        return _Request(None, (), trouble=trouble)
    response = _encoded(item.response)
    return _Request(TaskSpec.of(item.task), (item.split, item.index, response), len(response))


def _play_request(item: PlayItem) -> _Request:
    if trouble := _play_trouble(item):
        return _Request(None, (), trouble=trouble)
    actions = [_encoded(action) for action in item.actions]
    return _Request(TaskSpec.of(item.task), (item.seed, actions, item.truncated), sum(map(len, actions)))


def _score_trouble(item: ScoreItem) -> str:
    return _spec_trouble(item.task) or _length_trouble("a response", (item.response,))


def _play_trouble(item: PlayItem) -> str:
    if len(item.seed) != SEED_BYTES or len(item.actions) > TURNS_MAX:
        return f"an episode has a seed of {SEED_BYTES} bytes and at most {TURNS_MAX} actions"
    return _spec_trouble(item.task) or _length_trouble("an episode's actions", item.actions)


def _spec_trouble(task: TaskSpec | str) -> str:
    try:
        TaskSpec.of(task)
    except ValueError as error:
        return plain_text("", error)
    return ""


def _length_trouble(what: str, texts: Sequence[str]) -> str:
    length = sum(len(_encoded(text)) for text in texts)
    if length <= RESPONSE_BYTES_MAX:
        return ""
    return f"{what} of {length} bytes is above the {RESPONSE_BYTES_MAX} that are scored"


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a lone surrogate has no UTF-8


def _read_score(reply: Any) -> Score:
    if not isinstance(reply, list) or len(reply) != 2:
        raise WorkerLost("the scorer broke its protocol")
    return checked_score(reply[0], reply[1])


def _read_sizes(reply: Any) -> TaskSizes:
    match _answer(reply):
        case [int() as train, int() as heldout, int() as turns]:
            return TaskSizes(train, heldout, turns)
    raise WorkerLost("the scorer broke its protocol")


def _read_prompt(reply: Any) -> tuple[str, str]:
    match _answer(reply):
        case [str() as text, str() as prefill]:
            return text, prefill
    raise WorkerLost("the scorer broke its protocol")


def _read_samples(reply: Any) -> list[tuple[str, float]]:
    pairs: list[tuple[str, float]] = []
    answer = _answer(reply)
    for pair in answer if isinstance(answer, list) else [None]:
        match pair:
            case [str() as text, float() as reward] if not reward_trouble(reward) and len(pairs) < SAMPLES_MAX:
                pairs.append((text, reward))
            case _:
                raise WorkerLost("the scorer broke its protocol")
    return pairs


def _answer(reply: Any) -> Any:
    match reply:
        case [None, str() as reason]:
            _refuse(plain_text("", reason))
        case [answer, ""]:
            return answer
    raise WorkerLost("the scorer broke its protocol")


def _refuse(reason: str) -> NoReturn:
    raise TaskUnusable(reason)
