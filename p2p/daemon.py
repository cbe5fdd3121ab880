"""What the three daemons share: one process per state folder, a status file, log lines, a clean end, one-line errors.

A daemon's `main` is: settings -> `configure_logging` -> `with stoppable(), lock_state_dir(...)` -> the libraries that
take seconds to load -> `run_daemon(serve)`, the whole wrapped by `run_cli`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import trio
from pydantic import BaseModel

from . import open_files
from .errors import ConfigurationError, Echo2Error
from .log_lines import JsonLines, TextLines

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
"""The person who started the process must change something (also what typer uses for wrong options)."""

LOCK_FILE = "lock"
STATUS_FILE = "status.json"

PARENT_VARIABLE = "ECHO2_PARENT_PID"
"""In the environment of a daemon that is to end with the process that started it: that process's number."""

PARENT_LOOK_SECONDS = 1.0

PARENT_GONE_SECONDS = 15.0
"""From the parent's end to this one's, whatever it is stuck in: as a supervisor would kill it."""

SELDOM_SECONDS = 10.0
"""Between two sayings of the same trouble with accepting connections: in time for whoever looks, no flood."""

LOCK_LOOKS = 3
LOCK_LOOK_SECONDS = 0.05
"""Long enough for whoever only looks at the lock to have let go of it."""

log = logging.getLogger(__name__)

_unwritten: dict[Path, str] = {}
"""Status files that could not be written, and why: said once, not every second until the disk has room."""


# one process per state folder


@contextlib.contextmanager
def lock_state_dir(folder: Path) -> Iterator[None]:
    """Make `folder` (0700) if needed and hold its lock, which the system lets go of however the process dies.

    Raises ConfigurationError when another process holds it or the folder cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)  # unbuffered: nothing is left to write, and to fail, when it is closed
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot write to the folder {folder}: {_why(error)}") from error
    with file:
        if not _lock_soon(file, path):
            file.seek(0)
            owner = file.read(32).strip()
            raise ConfigurationError(
                f"another process{f' (pid {owner.decode()})' if owner.isdigit() else ''} already uses {folder}; "
                "stop it first, or choose another folder"
            )
        try:
            file.truncate(0)
            file.write(b"%d\n" % os.getpid())
        except OSError as error:
            raise ConfigurationError(f"cannot write to the folder {folder}: {_why(error)}") from error
        yield


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the folder's lock just now: it lives, however old its status file is."""
    try:
        with (folder / LOCK_FILE).open("r+b", buffering=0) as file:
            return not _try_lock(file)
    except OSError:
        return False


def keep_private(path: Path) -> None:
    """Make `path` if it is missing, so that only its owner can read it; one that others can read is mended, and said.

    Before a database opens it: SQLite gives its -wal and -shm the mode of the file. Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if os.name != "posix":
        return
    for name in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm"))):
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(name.stat().st_mode)
            if mode & 0o077:
                name.chmod(mode & 0o700)
                log.warning("%s could be read by others (mode %o); it is its owner's alone now", name, mode)


def _lock_soon(file: FileIO, path: Path) -> bool:
    """`is_in_use` of another process holds the lock for an instant: a second look tells it from an owner."""
    for _ in range(LOCK_LOOKS):
        try:
            if _try_lock(file):
                return True
        except OSError as error:
            raise ConfigurationError(
                f"cannot lock {path}: {_why(error)}; put the folder on a disk of this machine"
            ) from error
        time.sleep(LOCK_LOOK_SECONDS)
    return False


def _try_lock(file: FileIO) -> bool:
    """False when another process holds it. Raises OSError when the file system has no locks."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


# the status file


def write_status(path: Path, status: Mapping[str, Any] | BaseModel) -> None:
    """Replace `path` with `status` as JSON, atomically: a reader sees the old or the new one, never half.

    Not synced to disk: after a power cut the status is made anew anyway. A full disk is logged, once until it is
    written again or for another reason, and not raised: showing the state must never stop the work.
    """
    value = status.model_dump(mode="json") if isinstance(status, BaseModel) else dict(status)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        why = _why(error)
        if _unwritten.get(path) != why:
            log.warning("cannot write %s: %s; nothing else stops, and it is said again when it works", path, why)
        _unwritten[path] = why
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return
    if _unwritten.pop(path, None) is not None:
        log.info("%s is written again", path)


def read_status(path: Path) -> dict[str, Any] | None:
    """The status another process wrote, or None when there is none (yet)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# log lines


class SaidSeldom(logging.Filter):
    """Lets a logger's complaint through once in `SELDOM_SECONDS`, by the records' own time.

    For `trio.serve_listeners`, without a traceback: out of files, it logs the same one ten times a second. And for
    defects that strangers can ask for again and again, of which one is enough.
    """

    def __init__(self, *, tracebacks: bool = False) -> None:
        super().__init__()
        self._tracebacks = tracebacks
        self._said_at = -math.inf
        self._unsaid = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is said; then also how many were not. What is no complaint always is."""
        if record.levelno < logging.WARNING:
            return True
        if 0 <= record.created - self._said_at < SELDOM_SECONDS:
            self._unsaid += 1
            return False
        if self._unsaid:
            record.msg, record.args = f"{record.getMessage()} (and {self._unsaid} times since last said)", ()
        self._said_at, self._unsaid = record.created, 0
        if not self._tracebacks:
            record.exc_info = None
        return True


LOG_FORMATS = ("json", "text")


def configure_logging(daemon: str, level: str = "info", form: str = "") -> None:
    """Send log lines to stderr, by default as text to a terminal and as JSON to anything else.

    Other people's libraries are heard only from warnings up. Raises ConfigurationError for a format there is not.
    """
    if form not in {"", *LOG_FORMATS}:
        raise ConfigurationError(f"--log-format {form} is not {' or '.join(LOG_FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    as_text = sys.stderr.isatty() if not form else form == "text"
    handler.setFormatter(TextLines() if as_text else JsonLines(daemon))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("echo2").setLevel(level.upper())
    accepting = logging.getLogger("trio.serve_listeners")
    accepting.filters[:] = [SaidSeldom()]


# running and ending


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Around a daemon's start: SIGTERM and SIGINT end it with status 0 also while its libraries load, for seconds.

    Whatever it is at then may be cut short anywhere, as by a kill: files are made whole or not at all. `run_daemon` has
    its own, gentler way while it runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        log.info("%s while starting or ending: ending at once", signal.Signals(number).name)
        os._exit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_daemon(serve: Callable[[], Awaitable[None]]) -> None:
    """Run `serve` under trio until it returns or SIGTERM/SIGINT cancels it, which is a clean end (exit 0).

    A second signal, when the first one's cleaning up is stuck, ends the process at once.
    """
    open_files.raise_bound()
    trio.run(_until_signalled, serve, restrict_keyboard_interrupt_to_checkpoints=True)


async def _until_signalled(serve: Callable[[], Awaitable[None]]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            work = trio.CancelScope()
            nursery.start_soon(_watch, signals, work)
            if (parent := os.environ.get(PARENT_VARIABLE, "")).isdecimal() and os.name == "posix":
                nursery.start_soon(_end_with_parent, parent, work)
            with work:
                await serve()
            nursery.cancel_scope.cancel()


async def _watch(signals: AsyncIterator[int], work: trio.CancelScope) -> None:
    async for number in signals:
        name = signal.Signals(number).name
        if work.cancel_called:
            log.error("%s again: ending at once", name)
            os._exit(128 + number)
        log.info("%s: stopping", name)
        work.cancel()


async def _end_with_parent(parent: str, work: trio.CancelScope) -> None:
    """A daemon that serves one other process alone has nothing to do when that was killed."""
    while str(os.getppid()) == parent:  # noqa: ASYNC110 - the end of a parent rings no bell here
        await trio.sleep(PARENT_LOOK_SECONDS)
    log.warning("the process %s that started this one is gone: stopping", parent)
    work.cancel()
    await trio.sleep(PARENT_GONE_SECONDS)
    log.error("stopping takes too long: ending at once")
    os._exit(EXIT_FAILED)


def run_cli(function: Callable[[], Any]) -> None:
    """Call a command line's entry point; an error for a person becomes one line on stderr, no traceback.

    Exit 2 for ConfigurationError, 1 for another Echo2Error (a peer refused, the network did not deliver). `function` is
    a typer app or any callable. Errors inside a nursery's exception group count too, unless a bug is among them: then
    the traceback is shown.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name may hold what the terminal's encoding does not
            stream.reconfigure(errors="backslashreplace")
    try:
        function()
    except (Echo2Error, BaseExceptionGroup) as error:
        expected, bugs = BaseExceptionGroup("", [error]).split(Echo2Error)
        if bugs is not None or expected is None:
            raise
        mistake = expected.subgroup(ConfigurationError)
        print(f"error: {_one_line(mistake or expected)}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION if mistake else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _one_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())
