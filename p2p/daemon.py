"""What the three daemons share: one process per state folder, a status file, log lines, a clean end, one-line errors.

A daemon's `main` is: settings -> `configure_logging` -> `with lock_state_dir(...)` -> `run_daemon(serve)`, the whole
wrapped by `run_cli`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import trio
from pydantic import BaseModel

from .errors import ConfigurationError, Echo2Error

if TYPE_CHECKING:
    from pathlib import Path

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
"""The person who started the process must change something (also what typer uses for wrong options)."""

LOCK_FILE = "lock"
STATUS_FILE = "status.json"

log = logging.getLogger(__name__)


# one process per state folder


@contextlib.contextmanager
def lock_state_dir(folder: Path) -> Iterator[None]:
    """Make `folder` if needed and hold its lock; the system lets go of it when the process dies, however it dies.

    Raises ConfigurationError when another process holds it or the folder cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="ascii")
    except OSError as error:
        raise ConfigurationError(f"cannot write to the folder {folder}: {error.strerror}") from error
    with file:
        if not _try_lock(file.fileno()):
            file.seek(0)
            owner = file.read(32).strip()
            raise ConfigurationError(
                f"another process{f' (pid {owner})' if owner.isdigit() else ''} already uses {folder}; "
                "stop it first, or choose another folder"
            )
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _try_lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# the status file


def write_status(path: Path, status: Mapping[str, Any] | BaseModel) -> None:
    """Replace `path` with `status` as JSON, atomically: a reader sees the old or the new one, never half.

    Not synced to disk: after a power cut the status is made anew anyway. A full disk is logged, not raised: showing the
    state must never stop the work.
    """
    value = status.model_dump(mode="json") if isinstance(status, BaseModel) else dict(status)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_status(path: Path) -> dict[str, Any] | None:
    """The status another process wrote, or None when there is none (yet)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


# log lines


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, daemon, logger, message, `extra` fields, exception."""

    _STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName"}

    def __init__(self, daemon: str) -> None:
        super().__init__()
        self._daemon = daemon

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        moment = datetime.fromtimestamp(record.created, tz=UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "daemon": self._daemon,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: value for key, value in record.__dict__.items() if key not in self._STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure_logging(daemon: str, level: str = "info") -> None:
    """Send log lines to stderr. Other people's libraries are heard only from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(daemon))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("echo2").setLevel(level.upper())


# running and ending


def run_daemon(serve: Callable[[], Awaitable[None]]) -> None:
    """Run `serve` under trio until it returns or SIGTERM/SIGINT cancels it, which is a clean end (exit 0).

    A second signal, when the first one's cleaning up is stuck, ends the process at once.
    """
    trio.run(_until_signalled, serve, restrict_keyboard_interrupt_to_checkpoints=True)


async def _until_signalled(serve: Callable[[], Awaitable[None]]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            work = trio.CancelScope()
            nursery.start_soon(_watch, signals, work)
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


def run_cli(function: Callable[[], Any]) -> None:
    """Call a command line's entry point; an error for a person becomes one line on stderr, no traceback.

    Exit 2 for ConfigurationError, 1 for another Echo2Error (a peer refused, the network did not deliver). `function` is
    a typer app or any callable. Errors inside a nursery's exception group count too, unless a bug is among them: then
    the traceback is shown.
    """
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
