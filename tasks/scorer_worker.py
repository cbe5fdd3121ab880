"""The process every reward is computed in: reads batches of responses on stdin, answers each item on stdout.

Started by `scorer.open_scorer` as `python -I -m echo2.tasks.scorer_worker`, and talks only to it. Frames are a 4-byte
big-endian length and a msgpack value:

    worker  -> scorer   [layer, ...]                                        once, when confined and ready
    scorer  -> worker   [[task, split, index, response as UTF-8 bytes], ...]
    worker  -> scorer   [reward, reason]                                    one per item, in order, as soon as known

The end of its stdin ends it. It keeps no state between items.
"""

from __future__ import annotations

import math
import os
import runpy
import signal
import struct
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgpack

from .catalog import TASKS
from .confinement import confine
from .task import Score

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .task import Split, Task

LENGTH = struct.Struct(">I")

REWARD_MAX = 1e9
"""The wire's bound on the size of a reward; also keeps a mean over a batch finite."""

REASON_CHARACTERS_MAX = 200


def evaluate(tasks: Mapping[str, Task], task: str, split: Split, index: int, response: str) -> Score:
    """The score of one response. Never raises: what goes wrong is reward 0 with its reason."""
    try:
        adapter = tasks[task]
        score = adapter.score(adapter.prompt(split, index), response)
        return checked_score(score.reward, score.reason)
    except BaseException as error:  # noqa: BLE001  # SystemExit too: a scorer must not be able to end the batch
        return Score(0.0, _text(f"the scorer raised {type(error).__name__}: ", error))


def checked_score(reward: object, reason: object) -> Score:
    """A Score from values nobody vouches for."""
    if not isinstance(reward, float):
        return Score(0.0, _text("the reward is not a float but ", type(reward).__name__))
    if not math.isfinite(reward) or abs(reward) > REWARD_MAX:
        return Score(0.0, f"the reward {reward} is not a number of reasonable size")
    return Score(float(reward), _text("", reason))


def _text(start: str, rest: object) -> str:
    """A short reason that any msgpack or JSON writer accepts, of a value whose str() may raise or hold surrogates."""
    try:
        text = start + str(rest)
    except BaseException:  # noqa: BLE001  # str() of a scorer's own class is the scorer's code
        text = start + "(not printable)"
    return text[:REASON_CHARACTERS_MAX].encode("utf-8", "replace").decode()


def serve(source: BinaryIO, sink: BinaryIO, tasks: Mapping[str, Task]) -> None:
    """Answer batches until `source` ends. `sink` must not buffer: each reply is due at once."""
    while len(header := source.read(LENGTH.size)) == LENGTH.size:
        batch = msgpack.unpackb(source.read(LENGTH.unpack(header)[0]))
        for task, split, index, response in batch:
            score = evaluate(tasks, task, split, index, response.decode("utf-8", "replace"))
            sink.write(frame([score.reward, score.reason]))


def frame(value: Any) -> bytes:
    """One frame's bytes."""
    body = bytes(msgpack.packb(value))
    return LENGTH.pack(len(body)) + body


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move stdin and stdout to descriptors of our own, so that a scorer's print() cannot reach the protocol."""
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return os.fdopen(source, "rb"), cast("BinaryIO", os.fdopen(sink, "wb", buffering=0))


def main(arguments: list[str]) -> None:
    """Entry point: an optional argument is a Python file whose TASKS are added to the catalogue's."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A service manager signals the whole group: dying of it would cost an honest item its reward.
        signal.signal(ending, signal.SIG_IGN)
    source, sink = _take_pipes()
    tasks = dict(TASKS)
    for path in arguments:
        tasks |= runpy.run_path(path)["TASKS"]
    sink.write(frame(list(confine())))
    serve(source, sink, tasks)


if __name__ == "__main__":
    main(sys.argv[1:])
