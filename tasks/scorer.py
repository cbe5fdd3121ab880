"""Rewards, computed where a hostile response can do no harm (DESIGN section 9).

`open_scorer` runs one worker process (`scorer_worker`) that has no keys, no network and little of anything else; an
item that takes too long or crashes it costs that item its reward, and nobody else. `InlineScorer` calls the tasks
directly: for virtual time, and only with tasks that are trusted. One contract suite: `tests/contract/test_scorer.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgpack
import trio

from .catalog import TASKS
from .scorer_worker import LENGTH, checked_score, evaluate, frame
from .task import Score

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from .task import Split, Task

log = logging.getLogger(__name__)

ITEM_SECONDS_MAX = 2.0
"""A reward takes milliseconds; an attack on the scorer takes for ever. Wall clock, judged by this side."""

RESPONSE_BYTES_MAX = 1 << 20
"""Longer than any response within the wire's bound on tokens that is not padding; scored 0 unread."""

BATCH_ITEMS_MAX = 256
BATCH_BYTES_MAX = 4 << 20
"""One frame to the worker. What bounds the memory of both sides."""

REPLY_BYTES_MAX = 4096
"""A reward and at most 200 characters."""

START_SECONDS_MAX = 20.0
"""For a worker to import its tasks and confine itself, on a machine that is busy."""

START_ATTEMPTS = 5
START_BACKOFF_SECONDS = 0.5

WORKER_ITEMS_MAX = 50_000
"""After so many a fresh worker: bounds what a leaking scorer library holds, and its CPU allowance is never used up."""

ENDED_LOOK_SECONDS = 0.002
"""A killed process is gone within a few of these."""

_READ_BYTES = 1 << 16


class ScorerUnavailable(Exception):
    """No worker could be started, through no fault of any response. Try again later; nothing was scored."""


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One response to score: the decoded text, and which prompt of which task it answers."""

    task: str
    split: Split
    index: int
    response: str


class Scorer(Protocol):
    """Turns responses into rewards."""

    @property
    def confinement(self) -> tuple[str, ...]:
        """Layers that hold around the scorer (`confinement`); empty when it runs in this process."""

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One finite score an item, in order. Never raises for what an item holds; may raise ScorerUnavailable."""


class InlineScorer:
    """Scores in this process, at once: nothing bounds the time or reach of a task."""

    confinement: tuple[str, ...] = ()

    def __init__(self, tasks: Mapping[str, Task] = TASKS) -> None:
        self._tasks = tasks

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """As `Scorer.score`."""
        await trio.lowlevel.checkpoint()
        return [self._score_one(item) for item in items]

    def _score_one(self, item: ScoreItem) -> Score:
        if (length := len(item.response.encode("utf-8", "replace"))) > RESPONSE_BYTES_MAX:
            return _too_long(length)
        return evaluate(self._tasks, item.task, item.split, item.index, item.response)


@asynccontextmanager
async def open_scorer(
    *, item_seconds: float = ITEM_SECONDS_MAX, task_file: Path | None = None
) -> AsyncIterator[ProcessScorer]:
    """A scorer with its worker running. Raises ScorerUnavailable when none starts; leaves no process behind.

    `task_file` is a Python file whose TASKS (name -> Task) the worker adds to the catalogue: it is run unconfined.
    """
    scorer = ProcessScorer(item_seconds, task_file)
    try:
        await scorer.start()
        yield scorer
    finally:
        await scorer.close()


class ProcessScorer:
    """One worker process at a time, restarted when it dies, hangs or has done enough. Made by `open_scorer`."""

    def __init__(self, item_seconds: float, task_file: Path | None) -> None:
        self.confinement: tuple[str, ...] = ()
        self._item_seconds = item_seconds
        self._task_file = task_file
        self._turn = trio.Lock()  # the pipe carries one batch at a time
        self._worker: _Worker | None = None
        self._items_done = 0

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """As `Scorer.score`. Cancelling it kills the worker; the next call starts another."""
        scores: list[Score] = []
        async with self._turn:
            while len(scores) < len(items):
                encoded, unreadable = _next_batch(items[len(scores) : len(scores) + BATCH_ITEMS_MAX])
                if unreadable is not None:
                    scores.append(unreadable)
                else:
                    scores += await self._score_batch(encoded)
        return scores

    async def start(self) -> None:
        """Have a worker running. Raises ScorerUnavailable."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._worker = await _Worker.start(self._task_file)
            except (OSError, _WorkerLost) as error:
                log.warning("no scorer process (attempt %d of %d): %s", attempt, START_ATTEMPTS, error)
                await trio.sleep(START_BACKOFF_SECONDS * attempt)
            else:
                self.confinement = self._worker.confinement
                self._items_done = 0
                return
        raise ScorerUnavailable(f"a scorer process could not be started in {START_ATTEMPTS} attempts")

    async def close(self) -> None:
        """Kill the worker and wait for its end, even when cancelled."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()

    async def _score_batch(self, batch: list[Any]) -> list[Score]:
        """The batch's scores; when an item loses the worker, only those up to it: the caller sends the rest again."""
        if self._worker is None or self._items_done >= WORKER_ITEMS_MAX:
            await self.close()
            await self.start()
        assert self._worker is not None
        scores: list[Score] = []
        whole = False
        try:
            with trio.fail_after(self._item_seconds):
                await self._worker.send(batch)
            for _ in batch:
                scores.append(
                    await self._worker.reply(self._item_seconds)
                )  # not a comprehension: these are kept when one fails
            whole = True
        except (_WorkerLost, trio.TooSlowError) as error:
            reason = str(error) or "the scorer did not take the batch"
            log.warning("scored 0: %s", reason)
            scores.append(Score(0.0, reason))
        finally:
            self._items_done += len(scores)
            if not whole:  # cancelled, hung or dead: replies still to come would be taken for those of other items
                await self.close()
        return scores


class _WorkerLost(Exception):
    """The worker hung, died or broke its protocol; the text is fit to be a score's reason."""


class _Worker:
    """A running worker process and its two pipes."""

    def __init__(self, task_file: Path | None) -> None:
        """Start the process. Raises OSError.

        From this thread, and not through trio, which starts processes in a thread of its pool: Linux takes the thread
        that started a process for its parent, and would kill the worker whenever that thread has idled for long enough.
        """
        self.confinement: tuple[str, ...] = ()
        self._unread = bytearray()
        command = [sys.executable, "-I", "-m", f"{__package__}.scorer_worker"]
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                command + ([str(task_file)] if task_file else []),
                stdin=requests_out,
                stdout=replies_in,
                stderr=subprocess.DEVNULL,
                env={"LANG": "C.UTF-8"},  # nothing of ours: an environment may hold passwords
                cwd="/",
                start_new_session=True,  # Ctrl-C is for its parent
            )
        except OSError:
            os.close(requests_in)
            os.close(replies_out)
            raise
        finally:
            os.close(requests_out)
            os.close(replies_in)
        self._requests = trio.lowlevel.FdStream(requests_in)
        self._replies = trio.lowlevel.FdStream(replies_out)

    @classmethod
    async def start(cls, task_file: Path | None) -> _Worker:
        """A worker that has said it is ready. Raises OSError or _WorkerLost."""
        worker = cls(task_file)
        ready = False
        try:
            layers = await worker._receive(START_SECONDS_MAX)
            worker.confinement = tuple(str(layer) for layer in layers)
            ready = True
        finally:
            if not ready:
                await worker.kill()
        return worker

    async def send(self, batch: list[Any]) -> None:
        """Hand over one batch. Raises _WorkerLost."""
        try:
            await self._requests.send_all(frame(batch))
        except trio.BrokenResourceError as error:
            raise await self._death() from error

    async def reply(self, seconds: float) -> Score:
        """The next item's score. Raises _WorkerLost when it does not come in time."""
        reply = await self._receive(seconds)
        if not isinstance(reply, list) or len(reply) != 2:
            raise _WorkerLost("the scorer broke its protocol")
        return checked_score(reply[0], reply[1])

    async def kill(self) -> None:
        """End the process and wait until it is gone."""
        with trio.CancelScope(shield=True):
            self._process.kill()
            await self._ended()
            await self._requests.aclose()
            await self._replies.aclose()

    async def _receive(self, seconds: float) -> Any:
        with trio.move_on_after(seconds):
            while (body := self._frame()) is None:
                await self._take(await self._replies.receive_some(_READ_BYTES))
            return body
        # The time may have run out because this process was busy, not the worker: look once at what already lies there.
        with contextlib.suppress(BlockingIOError):
            await self._take(os.read(self._replies.fileno(), _READ_BYTES))
        if (body := self._frame()) is None:
            raise _WorkerLost(f"the scorer took longer than {seconds:g} s")
        return body

    async def _ended(self) -> None:
        while self._process.poll() is None:  # noqa: ASYNC110  # no event: trio waits only for processes it started
            await trio.sleep(ENDED_LOOK_SECONDS)

    async def _take(self, data: bytes) -> None:
        if not data:
            raise await self._death()
        self._unread += data

    def _frame(self) -> Any | None:
        if len(self._unread) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._unread)
        if length > REPLY_BYTES_MAX:
            raise _WorkerLost("the scorer broke its protocol")
        end = LENGTH.size + length
        if len(self._unread) < end:
            return None
        body = bytes(self._unread[LENGTH.size : end])
        del self._unread[:end]
        try:
            return msgpack.unpackb(body)
        except ValueError as error:
            raise _WorkerLost("the scorer broke its protocol") from error

    async def _death(self) -> _WorkerLost:
        with trio.move_on_after(1):  # its pipe is closed; its end follows at once unless it closed the pipe itself
            await self._ended()
        status = self._process.returncode
        how = "closed its pipe" if status is None else f"died (exit status {status})"
        return _WorkerLost(f"the scorer's process {how}")


def _next_batch(items: Sequence[ScoreItem]) -> tuple[list[Any], Score | None]:
    """As many of the leading items as fit a frame; or, when the first is not to be read at all, its score."""
    batch: list[Any] = []
    batch_bytes = 0
    for item in items:
        response = item.response.encode("utf-8", "replace")  # a lone surrogate has no UTF-8
        if len(response) > RESPONSE_BYTES_MAX:
            return (batch, None) if batch else ([], _too_long(len(response)))
        batch_bytes += len(response)
        if batch and batch_bytes > BATCH_BYTES_MAX:
            break
        batch.append([item.task, item.split, item.index, response])
    return batch, None


def _too_long(response_bytes: int) -> Score:
    return Score(0.0, f"a response of {response_bytes} bytes is above the {RESPONSE_BYTES_MAX} that are scored")
