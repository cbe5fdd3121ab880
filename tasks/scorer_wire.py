"""What the scorer and its worker say to each other: records, bounds, and the checks on what a worker answers.

Frames on the worker's stdin and stdout: a 4-byte big-endian length and a msgpack value.

    scorer -> worker   [[name, options as JSON], ...]                       once: the tasks this worker will know
    worker -> scorer   [task, stage]                                        before each stage of loading (`STAGES`)
    worker -> scorer   [[layer, ...], [reason or "", ...]]                  once, when they are loaded and it is
                                                                            confined; a reason for each unusable task
    scorer -> worker   ["score",   [[task, split, index, response], ...]]   task: place in the list above; text is UTF-8
    worker -> scorer   [reward, reason]                                     one per item, in order, as soon as known
    scorer -> worker   ["play",    [[task, seed, [action, ...], truncated], ...]]
    worker -> scorer   [[observation, ...], done, reward, reason, details]  one per item
    scorer -> worker   ["sizes",   [[task], ...]]
    worker -> scorer   [[train, heldout, turns], reason]                    one per item; turns is 0 for a single turn
    scorer -> worker   ["prompts", [[task, split, index], ...]]
    worker -> scorer   [[text, prefill], reason]                            one per item
    scorer -> worker   ["samples", [[task, split, index], ...]]
    worker -> scorer   [[[response, reward], ...], reason]                  one per item; no pairs from tasks without

The worker is stateless: each play starts from its seed. Nothing it answers is trusted to be of the right shape.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import msgpack

from .sandbox import DETAILS_MAX, OBSERVATION_CHARACTERS_MAX, TURNS_MAX
from .task import Score

if TYPE_CHECKING:
    from .task import Split, TaskSpec

LENGTH = struct.Struct(">I")

REWARD_MAX = 1e9
"""The wire's bound on the size of a reward; also keeps a mean over a batch finite."""

REASON_CHARACTERS_MAX = 200

DETAIL_NAME_CHARACTERS_MAX = 64

PROMPT_CHARACTERS_MAX = 65_536
"""Half the longest context in tokens that a model card may have; a longer prompt is a file put in by mistake."""

SAMPLES_MAX = 16
SAMPLE_CHARACTERS_MAX = 4096

SIZE_MAX = 10_000_000
"""Prompts of one split."""

REPLY_BYTES_MAX = {
    "score": 4096,  # a reward and at most 200 characters
    "play": (TURNS_MAX + 2) * (4 * OBSERVATION_CHARACTERS_MAX + 8) + 16_384,  # four bytes a character
    "sizes": 4096,
    "prompts": 8 * PROMPT_CHARACTERS_MAX + 4096,
    "samples": SAMPLES_MAX * (4 * SAMPLE_CHARACTERS_MAX + 32) + 4096,
    "ready": 65_536,
}
"""By operation: what is read of one reply at most."""

STAGES: Mapping[str, tuple[str, float]] = {
    "load": ("loading", 60.0),  # imports of libraries, two seconds on an idle machine, on one that is busy
    "prompt": ("prompt()", 60.0),  # some puzzles are slow to make
    "score": ("score()", 10.0),  # five times what a reward may take: a first call imports
    "reset": ("reset()", 10.0),
}
"""Of getting a task ready: what it is called, and the seconds it may take. The last three are a first call of each."""

_NO_DETAILS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One response to score: the decoded text, and which prompt of which task it answers."""

    task: TaskSpec | str
    split: Split
    index: int
    response: str


@dataclass(frozen=True, slots=True)
class PlayItem:
    """One episode to play from its beginning: the environment's seed (32 bytes) and what the policy said, in order.

    `truncated`: the policy then ran out of tokens or turns. No actions and not truncated: just the opening.
    """

    task: TaskSpec | str
    seed: bytes
    actions: tuple[str, ...] = ()
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Play:
    """What became of a `PlayItem`: the opening's text, one more for each action taken, and the truncation's if any.

    `reward` is the sum over the observations. An action after the end, a crash, a time-out, an oversized observation
    or a reward that is no finite float ends it: `done`, reward 0, no details, and a `reason` (else "").
    """

    observations: tuple[str, ...]
    done: bool
    reward: float
    reason: str = ""
    details: Mapping[str, float] = field(default_factory=lambda: _NO_DETAILS)


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """What the worker says of a task it has loaded. `turns_max` is 0 for a single-turn task."""

    train: int
    heldout: int
    turns_max: int = 0


def frame(value: Any) -> bytes:
    """One frame's bytes."""
    body = bytes(msgpack.packb(value))
    return LENGTH.pack(len(body)) + body


def checked_score(reward: object, reason: object) -> Score:
    """A Score from values nobody vouches for."""
    if trouble := reward_trouble(reward):
        return Score(0.0, trouble)
    assert isinstance(reward, float)
    return Score(float(reward), plain_text("", reason))


def reward_trouble(reward: object) -> str:
    """Why `reward` is none, or nothing."""
    if not isinstance(reward, float):
        return plain_text("the reward is not a float but ", type(reward).__name__)
    if not math.isfinite(reward) or abs(reward) > REWARD_MAX:
        return f"the reward {reward} is not a number of reasonable size"
    return ""


def checked_play(values: object) -> Play:
    """A Play from values nobody vouches for."""
    match values:
        case [list() as texts, bool() as done, reward, str() as reason, details]:
            pass
        case _:
            return failed_play("the scorer broke its protocol")
    if len(texts) > TURNS_MAX + 2:
        return failed_play(f"the episode has {len(texts)} observations, above {TURNS_MAX + 2}")
    observations = tuple(text for text in texts if isinstance(text, str) and len(text) <= OBSERVATION_CHARACTERS_MAX)
    if len(observations) < len(texts):
        return failed_play(f"an observation is no text of at most {OBSERVATION_CHARACTERS_MAX} characters")
    if reason:
        return failed_play(plain_text("", reason), observations)
    if trouble := reward_trouble(reward) or details_trouble(details):
        return failed_play(trouble, observations)
    return Play(observations, done, cast("float", reward), "", MappingProxyType(cast("dict[str, float]", details)))


def failed_play(reason: str, observations: tuple[str, ...] = ()) -> Play:
    """An episode that ended with a reason: reward 0."""
    return Play(observations, done=True, reward=0.0, reason=reason)


def details_trouble(details: object) -> str:
    """Why `details` are not a few named finite numbers, or nothing."""
    if not isinstance(details, Mapping) or len(details) > DETAILS_MAX:
        return f"the details of an episode are not a mapping of at most {DETAILS_MAX} numbers"
    for name, value in details.items():
        if not isinstance(name, str) or not 0 < len(name) <= DETAIL_NAME_CHARACTERS_MAX:
            return plain_text("an episode's detail has no name of reasonable length: ", name)
        if reward_trouble(value):
            return plain_text(f"an episode's detail {name} is no finite float: ", value)
    return ""


def plain_text(start: str, rest: object) -> str:
    """A short reason that any msgpack or JSON writer and any terminal accepts, of a value whose str() may raise."""
    try:
        text = start + str(rest)
    except BaseException:  # noqa: BLE001  # str() of a scorer's own class is the scorer's code
        text = start + "(not printable)"
    return printable(writable(text[:REASON_CHARACTERS_MAX]))[:REASON_CHARACTERS_MAX]


def printable(text: str) -> str:
    """`text` with whatever moves a terminal's cursor, colours it or turns its writing around written as an escape."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def writable(text: str) -> str:
    """`text` without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()
