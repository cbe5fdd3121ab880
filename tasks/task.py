"""What a researcher writes: prompts and a reward. Everything else of the system works from these protocols alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast, runtime_checkable

Split = Literal["train", "heldout"]

OPTIONS_BYTES_MAX = 4096
"""Canonical JSON of a task's options: a handful of numbers and a path; they travel in leases (sandbox tasks)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, as plain text; the model's card says how it is wrapped into a chat template.

    `prefill` is how the answer begins: it is part of the prompt, so it is neither sampled nor trained on.
    """

    split: Split
    index: int
    text: str
    prefill: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """A finite reward and, when it is not plainly earned, why (a crash or a time-out scores 0 with its reason)."""

    reward: float
    reason: str = ""


class Task(Protocol):
    """A task adapter (DESIGN section 4; the paper's data plane): builds prompts x and defines R(x, y).

    Pure and deterministic: the same index gives the same prompt in every process, and answers never leave the
    coordinator's side. `score` runs only inside the scorer's worker process, and may be handed any text at all.
    """

    @property
    def name(self) -> str:
        """The catalogue's key."""

    @property
    def train_size(self) -> int:
        """Number of distinct training prompts."""

    @property
    def heldout_size(self) -> int:
        """Number of held-out prompts; none is ever a training prompt."""

    def prompt(self, split: Split, index: int) -> Prompt:
        """Prompt `index` of `split`, 0 <= index < the split's size."""

    def score(self, prompt: Prompt, response: str) -> Score:
        """R(x, y) for the decoded response, special tokens left out."""


@runtime_checkable
class Prepared(Protocol):
    """A task, or a sandbox task, with something to load before it is used.

    `prepare` is called once, by the scorer's worker only, before it gives up the right to open files: heavy libraries
    are imported and data files read here, whatever a first call would load lazily included. Making a task must import
    nothing heavy and run nobody's code: the coordinator makes tasks too.
    """

    def prepare(self) -> None:
        """Load everything. Raises ValueError, fit to show a person, for what they must put right."""


@runtime_checkable
class Sampled(Protocol):
    """A task that knows some responses and what each must earn: what `echo2 task check` tries first."""

    def samples(self, prompt: Prompt) -> list[tuple[str, float]]:
        """(response, reward) pairs for one prompt; right and wrong ones."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskSpec:
    """A task's name and options, as a run's settings give them. Hashable; equal when the canonical JSON is.

    Raises ValueError, fit to show a person, for a malformed name, options that JSON cannot hold (NaN, dates, keys that
    are no strings) and more than `OPTIONS_BYTES_MAX` of them. Which options a task takes, `catalog.make_task` knows.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=lambda: _NO_OPTIONS)
    options_json: str = field(init=False)
    """The options as canonical JSON: keys sorted, no blanks, ASCII only."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"{str(self.name)[:64]!r} is not the name of a task")
        text = canonical_json(self.options)
        object.__setattr__(self, "options", MappingProxyType(json.loads(text)))  # a copy: nobody else can change it
        object.__setattr__(self, "options_json", text)

    @classmethod
    def of(cls, task: TaskSpec | str) -> TaskSpec:
        """A spec from a bare name, which has no options; a spec is returned as it is."""
        return cls(task) if isinstance(task, str) else task

    @classmethod
    def from_json(cls, name: str, options_json: str) -> TaskSpec:
        """The spec that `name` and `options_json` describe. Raises ValueError."""
        if len(options_json) > OPTIONS_BYTES_MAX:
            raise ValueError(_too_long(len(options_json)))
        try:
            options = json.loads(options_json)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a task's options are not JSON: {error}") from error
        return cls(name, options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskSpec) and (self.name, self.options_json) == (other.name, other.options_json)

    def __hash__(self) -> int:
        return hash((self.name, self.options_json))

    def __str__(self) -> str:
        return self.name if self.options_json == "{}" else f"{self.name} {self.options_json}"


def canonical_json(options: object) -> str:
    """A task's options as the one JSON text that stands for them. Raises ValueError, fit to show a person."""
    if not isinstance(options, Mapping):
        raise ValueError(  # noqa: TRY004  # one error for all that a person may have written wrong
            "a task's options must be a table of names and values"
        )
    try:
        plain = _plain(options)
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a task's options cannot be written as JSON: {error}") from error
    if len(text) > OPTIONS_BYTES_MAX:
        raise ValueError(_too_long(len(text)))
    return text


def _plain(value: object) -> object:
    """`value` with its mappings and tuples as JSON's own types; json.dumps takes other keys than strings, silently."""
    if isinstance(value, Mapping):
        for key in cast("Mapping[object, object]", value):
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _too_long(length: int) -> str:
    return f"a task's options are {length} bytes of JSON, above the {OPTIONS_BYTES_MAX} that a run may have"
