"""One worker process and its two pipes: started, asked, killed. What `scorer.ProcessScorer` is made of."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgpack
import trio

from .bubblewrap import wrapped
from .scorer_wire import LENGTH, REPLY_BYTES_MAX, STAGES, frame, plain_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .task import TaskSpec

START_SECONDS_MAX = 60.0
"""For a worker to be there and begin with its first task, half a second on an idle machine, on one that is busy."""

STAGES_MAX = 6
"""Of loading one task."""

ENDED_LOOK_SECONDS = 0.002
"""A killed process is gone within a few of these."""

_READ_BYTES = 1 << 16


class WorkerLost(Exception):
    """The worker hung, died or broke its protocol; the text is fit to be a score's reason."""


class ReplyLate(WorkerLost):
    """The worker did not answer in time."""


class TaskStopsWorker(WorkerLost):
    """A task, and no accident, keeps the worker from becoming ready: another attempt would end the same way."""


class Worker:
    """A running worker process."""

    def __init__(self, *, hash_seed: int, visible: Sequence[Path] | None) -> None:
        """Start the process. Raises OSError. `visible`: run it under bubblewrap, with these paths to be seen.

        From this thread, and not through trio, which starts processes in a thread of its pool: Linux takes the thread
        that started a process for its parent, and would kill the worker whenever that thread has idled for long enough.
        """
        self.confinement: tuple[str, ...] = ()
        self.troubles: tuple[str, ...] = ()
        self._unread = bytearray()
        command = [sys.executable, "-s", "-P", "-B", "-m", f"{__package__}.scorer_worker"]
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                command if visible is None else wrapped(command, visible),
                stdin=requests_out,
                stdout=replies_in,
                stderr=subprocess.DEVNULL,
                env=_environment(hash_seed),
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
        self.pid = self._process.pid
        self._requests = trio.lowlevel.FdStream(requests_in)
        self._replies = trio.lowlevel.FdStream(replies_out)

    @classmethod
    async def start(cls, specs: Sequence[TaskSpec], *, hash_seed: int, visible: Sequence[Path] | None) -> Worker:
        """A worker that has loaded `specs` (`troubles` says what became of each). Raises OSError or WorkerLost."""
        worker = cls(hash_seed=hash_seed, visible=visible)
        ready = False
        try:
            await worker.send([[spec.name, spec.options_json] for spec in specs])
            layers, troubles = await worker._loaded(specs)
            worker.confinement = tuple(plain_text("", layer) for layer in layers)
            worker.troubles = tuple(plain_text("", trouble) for trouble in troubles)
            ready = True
            if visible is not None:
                worker.confinement += ("bubblewrap",)
        finally:
            if not ready:
                await worker.kill()
        return worker

    async def _loaded(self, specs: Sequence[TaskSpec]) -> tuple[list[Any], list[Any]]:
        """Layers and troubles, once every task has gone through its stages. Raises WorkerLost."""
        task, stage, seconds = "", "", START_SECONDS_MAX
        for _ in range(STAGES_MAX * len(specs) + 1):
            try:
                reply = await self.reply("ready", seconds)
            except ReplyLate as error:
                if not stage:
                    raise
                late = "took longer than" if stage == "loading" else "did not return within"
                raise TaskStopsWorker(f"{task}: {stage} {late} {seconds:g} s") from error
            except WorkerLost as error:
                if stage in ("", "loading"):  # for want of memory, perhaps: worth another attempt
                    raise WorkerLost(
                        f"{task}: loading it ended its process: {error}" if stage else str(error)
                    ) from error
                raise TaskStopsWorker(f"{task}: {stage}, called once to try it, ended its process: {error}") from error
            match reply:
                case [list() as layers, list() as troubles] if len(troubles) == len(specs):
                    return layers, troubles
                case [int() as place, str() as name] if 0 <= place < len(specs) and name in STAGES:
                    task, (stage, seconds) = f"the task {_named(specs[place])}", STAGES[name]
                case _:
                    break
        raise WorkerLost("the scorer broke its protocol")

    async def send(self, request: list[Any]) -> None:
        """Hand over one frame. Raises WorkerLost."""
        try:
            await self._requests.send_all(frame(request))
        except trio.BrokenResourceError as error:
            raise await self._death() from error

    async def reply(self, operation: str, seconds: float) -> Any:
        """The next frame. Raises WorkerLost when none comes in time that is within the operation's bound."""
        bytes_max = REPLY_BYTES_MAX[operation]
        with trio.move_on_after(seconds):
            while (body := self._frame(bytes_max)) is None:
                await self._take(await self._replies.receive_some(_READ_BYTES))
            return _unpacked(body)
        # The time may have run out because this process was busy, not the worker: look once at what already lies there.
        with contextlib.suppress(BlockingIOError):
            await self._take(os.read(self._replies.fileno(), _READ_BYTES))
        if (body := self._frame(bytes_max)) is None:
            raise ReplyLate(f"the scorer took longer than {seconds:g} s")
        return _unpacked(body)

    async def kill(self) -> None:
        """End the process, and whatever it has started, and wait until it is gone."""
        with trio.CancelScope(shield=True):
            if self._process.returncode is None:
                self._kill_group()
            await self._ended()
            await self._requests.aclose()
            await self._replies.aclose()

    async def _ended(self) -> None:
        """Wait for the process's end, and end the others of its group before its number may go to somebody else."""
        while not self._has_ended():  # noqa: ASYNC110  # no event: trio waits only for processes it started
            await trio.sleep(ENDED_LOOK_SECONDS)

    def _has_ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        if hasattr(os, "waitid"):  # looks without burying: until it is buried, the group's number is its own
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._kill_group()
        elif self._process.poll() is None:
            return False
        return self._process.poll() is not None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _take(self, data: bytes) -> None:
        if not data:
            raise await self._death()
        self._unread += data

    def _frame(self, bytes_max: int) -> bytes | None:
        if len(self._unread) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._unread)
        if length > bytes_max:
            raise WorkerLost("the scorer broke its protocol")
        end = LENGTH.size + length
        if len(self._unread) < end:
            return None
        body = bytes(self._unread[LENGTH.size : end])
        del self._unread[:end]
        return body

    async def _death(self) -> WorkerLost:
        with trio.move_on_after(1):  # its pipe is closed; its end follows at once unless it closed the pipe itself
            await self._ended()
        status = self._process.returncode
        how = "closed its pipe" if status is None else f"died (exit status {status})"
        return WorkerLost(f"the scorer's process {how}")


def _named(spec: TaskSpec) -> str:
    """A task's name, and its file's."""
    path = spec.options.get("path")
    return plain_text(f"{spec.name!r}", "" if path is None else f" ({PurePath(str(path)).name})")


def _unpacked(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body)
    except ValueError as error:
        raise WorkerLost("the scorer broke its protocol") from error


def _environment(hash_seed: int) -> dict[str, str]:
    """Nothing of ours, which may hold passwords, but where our own package lies."""
    environment = {
        "LANG": "C.UTF-8",
        # Some task libraries draw from sets: one seed for all workers, or a restart would change their prompts.
        "PYTHONHASHSEED": str(hash_seed),
        # A confined process can start no thread, and these libraries start theirs as they are imported.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return environment
