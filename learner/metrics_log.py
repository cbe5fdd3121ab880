"""Each step's numbers on disk, one JSON object a line in `metrics.jsonl`, and to what its owner watches runs with.

No step comes twice and none is missing, whatever is killed when: a step's line is written when the step is trained and
is durable before the checkpoint that covers it, and on resuming from version v the lines of steps v and above, which
are undone, are cut off, and so is half a line. A disk that is full keeps the lines waiting in memory: training goes on,
and the next checkpoint, which waits for the disk anyway, waits for them too.
"""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import FileIO
    from pathlib import Path

    from echo2.p2p.messages import StepMetrics

METRICS_FILE = "metrics.jsonl"

LINE_BYTES_MAX = 1 << 20
"""Far above a step's line; what is longer is damage."""

log = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """Where steps go. The order is `begin`, then `step` for each, then `close`."""

    def begin(self, version: int) -> None:
        """The run goes on from this version: steps from it on that are here are undone."""

    def step(self, metrics: StepMetrics, *, epoch: int, wall_seconds: float) -> None:
        """A step was trained."""

    def close(self) -> None:
        """Nothing more comes."""


def plain(metrics: StepMetrics) -> dict[str, Any]:
    """Every field of a step as JSON has it; a lease's id in hexadecimal."""
    values: dict[str, Any] = json.loads(json.dumps(metrics.model_dump(), default=lambda value: bytes(value).hex()))
    return values


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a step, the step's own left out; drops are summed over lengths, by reason."""
    values = {
        name: float(value)
        for name, value in metrics.model_dump().items()
        if isinstance(value, int | float) and name != "step"
    }
    for drop in metrics.drops:
        name = f"drops/{drop.reason}"
        values[name] = values.get(name, 0.0) + drop.count
    values["updates_skipped"] = float(len(metrics.updates_skipped))
    return values


class MetricsFile:
    """`metrics.jsonl`. Only `begin` and `durable` raise, OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._size = 0
        self._waiting: list[bytes] = []

    def begin(self, version: int) -> None:
        """Open the file and cut off what is undone. Raises OSError."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._size, cut = _kept(self._path, version)
        if cut:
            log.info("%s: what was written of steps from %d on is cut off: they are undone", self._path, version)
        self._cut()
        self._waiting.clear()

    def step(self, metrics: StepMetrics, *, epoch: int, wall_seconds: float) -> None:
        """Append a line; one that cannot be written now waits."""
        line = plain(metrics) | {"epoch": epoch, "wall_seconds": wall_seconds}
        self._waiting.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            log.warning("%s cannot be written, %d steps wait: %s", self._path, len(self._waiting), error)

    def durable(self) -> None:
        """Every step so far is on the disk when this returns. Raises OSError."""
        if self._file is not None:
            self._write()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        assert self._file is not None, "begun"
        data = b"".join(self._waiting)
        try:
            self._file.seek(self._size)
            done = 0
            while done < len(data):
                done += self._file.write(data[done:]) or 0
        except OSError:
            self._cut()  # no half line stays behind
            raise
        self._size += len(data)
        self._waiting.clear()

    def _cut(self) -> None:
        assert self._file is not None, "begun"
        self._file.truncate(self._size)


def _kept(path: Path, version: int) -> tuple[int, bool]:
    """Bytes of the whole lines of steps below `version`, in order; and whether there is more than those."""
    kept, last = 0, -1
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES_MAX):
            step = _step_of(line)
            if step is None or not last < step < version:
                return kept, True
            kept, last = kept + len(line), step
    return kept, False


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


class MetricsLog:
    """The file, and beside it what may fail without harm: a board that is gone costs its curves, never the run."""

    def __init__(self, file: MetricsFile, boards: Sequence[MetricsSink] = ()) -> None:
        self._file = file
        self._boards = list(boards)

    def begin(self, version: int) -> None:
        """See `MetricsSink`. Raises OSError when the file cannot be used."""
        self._file.begin(version)
        self._each(lambda board: board.begin(version))

    def step(self, metrics: StepMetrics, *, epoch: int, wall_seconds: float) -> None:
        """See `MetricsSink`."""
        self._file.step(metrics, epoch=epoch, wall_seconds=wall_seconds)
        self._each(lambda board: board.step(metrics, epoch=epoch, wall_seconds=wall_seconds))

    def durable(self) -> None:
        """See `MetricsFile.durable`. Raises OSError."""
        self._file.durable()

    def close(self) -> None:
        """Close all of them."""
        self._file.close()
        self._each(lambda board: board.close())

    def _each(self, call: Callable[[MetricsSink], None]) -> None:
        for board in list(self._boards):
            try:
                call(board)
            except Exception as error:  # noqa: BLE001 - other people's code, on which no training may depend
                log.warning("%s is left out from here on: %s", type(board).__name__, error)
                self._boards.remove(board)
