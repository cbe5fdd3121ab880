"""A researcher's own task: one Python file, loaded in the scorer's worker and nowhere else.

The file defines either `task`, an object that satisfies `task.Task`, or two functions:

    def prompts():                  # each a text, or a table with at least "prompt"; "prefill" and "heldout" are
        return [{"prompt": "2+2=", "answer": "4"}, ...]     # known, whatever else stands in it is the file's own

    def score(example, response):   # a number; `example` is what prompts() gave
        return 1.0 if response.strip() == example["answer"] else 0.0

and perhaps `samples(example)`, a list of (response, reward) pairs that `echo2 task check` tries. Where no example says
"heldout", one in ten is held out, chosen by a hash of its prompt.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from . import options
from .task import Prompt, Sampled, Score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .task import Split, Task

FILE_BYTES_MAX = 4 << 20
"""Source code; data belongs into a file beside it."""

EXAMPLES_MAX = 1_000_000

HELDOUT_ONE_IN = 10

_PROTOCOL = ("train_size", "heldout_size", "prompt", "score")


class FileTask:
    """The task of the file at `path`. Only the name is known before `prepare` has run the file."""

    name = "file"

    def __init__(self, path: str) -> None:
        self.path = options.path("path", path)
        self._task: Task | None = None

    def prepare(self) -> None:
        """Run the file. Raises ValueError when it is no task; what the file raises, it raises."""
        if not self.path.is_file():
            raise ValueError(f"there is no file {str(self.path)!r}, or it is not to be seen from the scorer's process")
        if self.path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"the file {self.path.name} is larger than {FILE_BYTES_MAX} bytes: is it Python?")
        self._task = task_of(runpy.run_path(str(self.path)))

    @property
    def train_size(self) -> int:
        """As the file has it. Only in the worker, like everything below."""
        return self._loaded.train_size

    @property
    def heldout_size(self) -> int:
        """As the file has it."""
        return self._loaded.heldout_size

    def prompt(self, split: Split, index: int) -> Prompt:
        """As the file has it."""
        return self._loaded.prompt(split, index)

    def score(self, prompt: Prompt, response: str) -> Score:
        """As the file has it. A plain number is taken for a score."""
        score = self._loaded.score(prompt, response)
        return score if isinstance(score, Score) else _score(score)

    def samples(self, prompt: Prompt) -> list[tuple[str, float]]:
        """As the file has them; none when it has none."""
        task = self._loaded
        return list(task.samples(prompt)) if isinstance(task, Sampled) else []

    @property
    def _loaded(self) -> Task:
        if self._task is None:
            raise RuntimeError("a person's task file is loaded in the scorer's process only")
        return self._task


class FunctionsTask:
    """The task made of a file's functions."""

    name = "file"

    def __init__(
        self,
        prompts: Callable[[], Iterable[Any]],
        score: Callable[[Mapping[str, Any], str], Any],
        samples: Callable[[Mapping[str, Any]], Iterable[tuple[str, float]]] | None = None,
    ) -> None:
        self._score = score
        self._samples = samples
        self._examples: dict[Split, list[Mapping[str, Any]]] = {"train": [], "heldout": []}
        examples: list[Mapping[str, Any]] = []
        for example in prompts():
            if len(examples) >= EXAMPLES_MAX:
                raise ValueError(f"prompts() gave more than {EXAMPLES_MAX} examples")
            examples.append(_example(example, len(examples)))
        marked = any("heldout" in example for example in examples)
        for example in examples:
            heldout = example.get("heldout", False) if marked else _is_heldout(example["prompt"])
            self._examples["heldout" if heldout else "train"].append(example)
        for split, members in self._examples.items():
            if not members:
                raise ValueError(f"prompts() gave {len(examples)} examples, of which none is for {_PURPOSE[split]}")

    @property
    def train_size(self) -> int:
        """Examples that are not held out."""
        return len(self._examples["train"])

    @property
    def heldout_size(self) -> int:
        """Examples that are."""
        return len(self._examples["heldout"])

    def prompt(self, split: Split, index: int) -> Prompt:
        """Prompt `index` of `split`, in the order of prompts(). Raises IndexError outside it."""
        example = self._example(split, index)
        return Prompt(split, index, example["prompt"], example.get("prefill", ""))

    def score(self, prompt: Prompt, response: str) -> Score:
        """What the file's score() says of the example and the response."""
        return _score(self._score(self._example(prompt.split, prompt.index), response))

    def samples(self, prompt: Prompt) -> list[tuple[str, float]]:
        """What the file's samples() says of the example."""
        return [] if self._samples is None else list(self._samples(self._example(prompt.split, prompt.index)))

    def _example(self, split: Split, index: int) -> Mapping[str, Any]:
        if index < 0:
            raise IndexError(f"no prompt {index}")
        return self._examples[split][index]


_PURPOSE: Mapping[Split, str] = {"train": "training", "heldout": "evaluation"}


def task_of(names: Mapping[str, Any]) -> Task:
    """The task that a file's global names make. Raises ValueError, fit to show a person, when they make none."""
    if "task" in names:
        task = names["task"]
        if isinstance(task, type):
            raise ValueError(f"`task` is the class {task.__name__}, not an object: write task = {task.__name__}()")
        if hasattr(task, "sandbox"):
            raise ValueError(
                "`task` is played over several turns: a sandbox must be one of the catalogue's, because nodes run no "
                "code that arrives over the network"
            )
        lacking = [part for part in _PROTOCOL if not hasattr(task, part)]
        if lacking:
            raise ValueError(f"`task` lacks {', '.join(lacking)}: see Task in tasks/task.py")
        return cast("Task", task)
    lacking = [name for name in ("prompts", "score") if not callable(names.get(name))]
    if lacking:
        raise ValueError(
            "the file must define either an object `task` or the functions prompts() and score(example, response); "
            f"it lacks {', '.join(lacking)}"
        )
    return FunctionsTask(names["prompts"], names["score"], names.get("samples"))


def _example(example: Any, place: int) -> Mapping[str, Any]:
    """An example as a table; raises ValueError, like every other mistake in the file."""
    if isinstance(example, str):
        return {"prompt": example}
    known = dict(example) if isinstance(example, Mapping) else {}
    for key, kind, default in (("prompt", str, None), ("prefill", str, ""), ("heldout", bool, False)):
        if type(known.get(key, default)) is not kind:
            wanted = "a text" if kind is str else "true or false"
            raise ValueError(f'example {place} of prompts() is neither a text nor a table whose "{key}" is {wanted}')
    return known


def _is_heldout(prompt: str) -> bool:
    digest = blake2b(prompt.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0


def _score(value: Any) -> Score:
    """score() functions return 1, 0.5 or True; anything else is left to the worker's own check."""
    return Score(float(value) if isinstance(value, (bool, int, float)) else value)
