"""The demo's processes: started apart, watched, restarted a bounded number of times, and none left behind.

Each child leads a process group of its own, so that Ctrl-C reaches only the demo, which then ends the children in
order, and so that a child's own helpers (an engine, a scorer) can be ended with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from echo2.p2p.daemon import PARENT_VARIABLE
from echo2.p2p.errors import ConfigurationError, Echo2Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

RESTARTS_MAX = 3
"""As a supervisor would: a crash or two are survived, a daemon that cannot run is not restarted all night."""

RESTART_SECONDS = 1.0
"""Before the first restart; doubled each time."""

STOP_SECONDS = 15.0
"""From SIGTERM to SIGKILL."""

EXIT_CONFIGURATION = 2
"""A daemon that says its settings are wrong will say so again: no restart."""

LOG_TAIL_BYTES = 8192
REASON_CHARACTERS_MAX = 300


class ChildFailed(Echo2Error):
    """A child cannot be kept running; the text says which and why."""


def command(name: str, *arguments: str) -> list[str]:
    """argv of one of our console scripts, of this same installation."""
    script = Path(sys.executable).with_name(f"{name}.exe" if sys.platform == "win32" else name)
    if script.exists():
        return [str(script), *arguments]
    module = name.removeprefix("echo2-")
    return [sys.executable, "-c", f"from echo2.{module}.main import main; main()", *arguments]


def child_environment() -> dict[str, str]:
    """Ours, with one thread per numeric library: N processes on one machine must not each take every core."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    lifeline = {PARENT_VARIABLE: str(os.getpid())}  # a demo that is killed leaves nothing behind
    return os.environ | dict.fromkeys(threads, "1") | quiet | lifeline


@dataclass(slots=True)
class Child:
    """One child: how it is started, and what became of it."""

    name: str
    argv: Sequence[str]
    log: Path
    process: trio.Process | None = None
    restarts: int = 0
    ending: bool = False
    """Told to stop: its end is no failure."""

    swept: bool = True
    """Nothing of its process group is left."""


class Children:
    """The demo's children. `tell` is handed a line about each restart."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._children: dict[str, Child] = {}

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts of each child so far."""
        return {child.name: child.restarts for child in self._children.values()}

    @property
    def alive(self) -> list[str]:
        """Names of those whose process is alive now."""
        return [name for name in self._children if self.running(name)]

    def running(self, name: str) -> bool:
        """Whether the child's process is alive now."""
        process = self._children[name].process
        return process is not None and process.returncode is None

    async def finish(self, name: str, argv: Sequence[str], log: Path, *, seconds: float) -> str:
        """Run a command to its end and return its stdout. Raises ChildFailed; leaves no process behind."""
        child = self._children[name] = Child(name, argv, log)
        output = log.with_suffix(".out")
        await self._start(child, stdout=output)
        with trio.move_on_after(seconds):
            code = await self._wait(child)
            if code != 0:
                raise self._failure(child, code)
            return output.read_text(encoding="utf-8")
        raise ChildFailed(f"{name} did not end within {seconds:.0f} s; its log is {log}")

    async def keep(self, name: str, argv: Sequence[str], log: Path) -> None:
        """Run a daemon, restarting it when it dies, until it was told to stop. Raises ChildFailed."""
        child = self._children[name] = Child(name, argv, log)
        while True:
            await self._start(child)
            code = await self._wait(child)
            if child.ending:
                return
            if code == EXIT_CONFIGURATION or child.restarts == RESTARTS_MAX:
                raise self._failure(child, code)
            pause = RESTART_SECONDS * 2**child.restarts
            child.restarts += 1
            why = f" ({last_line(log)})" if code >= 0 else ""  # what it said last has nothing to do with a kill
            self._tell(f"{name} {_ended(code)}{why}; restart {child.restarts} of {RESTARTS_MAX} in {pause:.0f} s")
            await trio.sleep(pause)
            if child.ending:
                return

    async def stop(self, names: Iterable[str]) -> None:
        """SIGTERM to these, SIGKILL to those still there after a bound, and to whatever they started."""
        children = [self._children[name] for name in names if name in self._children]
        for child in children:
            child.ending = True
            _signal(child, kill=False)
        with trio.move_on_after(STOP_SECONDS):
            for child in children:
                await self._wait(child)
        for child in children:
            if child.process is not None and child.process.returncode is None:
                self._tell(f"{child.name} did not stop within {STOP_SECONDS:.0f} s and was killed")
                _signal(child, kill=True)
            await self._wait(child)

    async def stop_all(self) -> None:
        """The last thing the demo does; not to be cut short."""
        with trio.CancelScope(shield=True):
            await self.stop(list(self._children))

    def kill_all(self) -> None:
        """At once, for a demo that was told twice to end."""
        for child in self._children.values():
            if not child.swept:
                _signal(child, kill=True)

    async def _start(self, child: Child, stdout: Path | None = None) -> None:
        with child.log.open("ab") as log, contextlib.ExitStack() as stack:
            output = log if stdout is None else stack.enter_context(stdout.open("wb"))
            try:
                with trio.CancelScope(shield=True):  # a process half started would be nobody's
                    child.process = await trio.lowlevel.open_process(
                        list(child.argv),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=log,
                        env=child_environment(),
                        start_new_session=True,
                    )
            except OSError as error:
                raise ConfigurationError(f"cannot start {child.argv[0]}: {error.strerror}") from error
        child.swept = False

    async def _wait(self, child: Child) -> int:
        if child.process is None:
            return 0
        code = await child.process.wait()
        if not child.swept:  # once and at once: later the number of its group may be another's
            child.swept = True
            _signal(child, kill=True)
        return code

    def _failure(self, child: Child, code: int) -> ChildFailed:
        return ChildFailed(f"{child.name} {_ended(code)}: {last_line(child.log) or f'see {child.log}'}")


def last_line(log: Path) -> str:
    """The last line a child wrote, of a log record its message; "" when it wrote none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    written = [line.strip() for line in lines if line.strip()]
    line = written[-1].removeprefix("error: ") if written else ""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        line = str(json.loads(line)["message"])
    return line[:REASON_CHARACTERS_MAX]


def _ended(code: int) -> str:
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


def _signal(child: Child, *, kill: bool) -> None:
    """SIGTERM to the child, which ends its own helpers; SIGKILL to its whole group, dead leader or not."""
    process = child.process
    if process is None:
        return
    if kill and sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.returncode is None:
        process.kill() if kill else process.terminate()
