"""Any data set of the library reasoning_gym, by its name: puzzles made from a seed, each with its own scorer.

Several of the library's scorers evaluate the response as code. Two things stand against that. They get no code: where
they call eval() they are given a reader of literals instead, and where they hand the response to sympy, which evaluates
it too, only arithmetic with known names is let through. And the library is used in the scorer's confined worker alone:
it is imported by `prepare`, which only the worker calls, and the coordinator holds the prompts as text
(`materialised`). The first keeps a response from choosing its own reward, the second keeps the machine safe from what
the first has overlooked.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from . import options
from .catalog import suggestion
from .lazy_imports import import_what_sympy_imports_late
from .task import Prompt, Score

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .task import Split

SEED_MAX = 2**31 - 1
"""The library adds indices to it and hands the sum to generators that take 32 bits."""

SIZE_MAX = 100_000

EXPRESSION_CHARACTERS_MAX = 4096

ENTRIES_CACHED = 4096
"""An entry is made again for each response to it, and a group's responses come together; some take long to make."""

_PLOTS = (
    *("matplotlib", "matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections"),
    *("mpl_toolkits", "mpl_toolkits.mplot3d"),
)

_SCORES_ANYTHING = frozenset({"game_of_life_halting"})
"""Data sets whose scorer, in this release, takes every answer for right: theirs must be equal to the entry's."""

_READS_FILES = frozenset({"figlet_font"})
"""Data sets that open a file for each entry: theirs are made at once, while files may be opened."""

_EVALUATES_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets whose scorer calls eval() on a response that is not the answer, in case it is a list."""

_EVALUATES_EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Data sets whose scorer calls sympy's parse_expr(), which evaluates whatever Python it is given."""

_NAMES = frozenset(
    {
        "Abs",
        "E",
        "I",
        "Integer",
        "Rational",
        "acos",
        "acot",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "cot",
        "csc",
        "exp",
        "ln",
        "log",
        "pi",
        "sec",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    }
)

_NOT_ARITHMETIC = re.compile(r"[^A-Za-z0-9_+\-*/^(),.=! \t\r\n]|\.\s*[A-Za-z_]|[A-Za-z_]\s*\.")
"""Quotes, brackets and colons; and attributes: a dot stands between digits."""

_TOWER = re.compile(r"(?:\*\*|\^)[ \t]*[-+(]*[ \t]*[A-Za-z0-9_.]+[ \t]*(?:\*\*|\^)")

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_OURS = frozenset({"seed", "size"})

SHOTS_MAX = 16

PREFILL_CHARACTERS_MAX = 256


class ReasoningGymTask:
    """One data set: entries 0 ... train_size - 1 are for training, the heldout_size after them are held out.

    A small model answers in sentences where the library's scorers want the bare answer. `shots` entries beyond those
    are shown before each question with their answers, and `prefill` is how every answer begins (`Prompt.prefill`).

    All entries of a data set follow from (options, seed, index), and two indices never draw the same random numbers.
    A small puzzle may still come up twice: `materialised` leaves such held-out prompts out.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        dataset: str,
        dataset_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        train_size: int = 2000,
        heldout_size: int = 100,
        shots: int = 0,
        prefill: str = "",
    ) -> None:
        self.dataset = options.text("dataset", dataset, characters_max=64)
        self._options = options.table("dataset_options", dict(dataset_options or {}))
        for option in _OURS & set(self._options):
            raise ValueError(f"dataset_options.{option} is set by the task's options seed, train_size, heldout_size")
        self._seed = options.whole_number("seed", seed, low=0, high=SEED_MAX)
        self.train_size = options.whole_number("train_size", train_size, low=1, high=SIZE_MAX)
        self.heldout_size = options.whole_number("heldout_size", heldout_size, low=1, high=SIZE_MAX)
        self._shots = options.whole_number("shots", shots, low=0, high=SHOTS_MAX)
        self._prefill = options.text("prefill", prefill, characters_max=PREFILL_CHARACTERS_MAX) if prefill else ""
        self._shown = ""
        self._entries: Any = None
        self._score_answer: Any = None
        self._entry = lru_cache(maxsize=ENTRIES_CACHED)(self._make_entry)

    def prepare(self) -> None:
        """Import the library and set up the data set. Raises ValueError for an unknown name or option."""
        try:
            with _without_plots():
                import reasoning_gym
                from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ValueError(f"reasoning_gym cannot be imported ({error}): pip install reasoning-gym") from error
        if self.dataset not in DATASETS:
            hint = suggestion(self.dataset, DATASETS) or "."
            raise ValueError(
                f"reasoning_gym has no data set {self.dataset!r}{hint} It has: {', '.join(sorted(DATASETS))}."
            )
        _, config = DATASETS[self.dataset]
        known = set(config.__dataclass_fields__) - _OURS
        for option in set(self._options) - known:
            raise ValueError(
                f"the data set {self.dataset!r} has no option {option[:64]!r}{suggestion(option, known)} "
                f"(its options: {', '.join(sorted(known))})"
            )
        try:
            self._entries = reasoning_gym.create_dataset(
                self.dataset, seed=self._seed, size=self.train_size + self.heldout_size + self._shots, **self._options
            )
        except (AssertionError, TypeError, ValueError) as error:  # how the library's configurations complain
            raise ValueError(f"the data set {self.dataset!r} refuses its options: {error}") from error
        self._score_answer = self._entries.score_answer
        if self.dataset in _SCORES_ANYTHING:
            self._score_answer = lambda answer, entry: float(answer == entry["answer"])
        if self.dataset in _EVALUATES_LITERALS:
            vars(sys.modules[type(self._entries).__module__])["eval"] = ast.literal_eval
        import_what_sympy_imports_late()
        if self.dataset in _READS_FILES:
            size = self.train_size + self.heldout_size + self._shots
            self._entries = [self._entries[index] for index in range(size)]
        self._shown = "".join(map(self._shot, range(self._shots)))

    def prompt(self, split: Split, index: int) -> Prompt:
        """The entry's question. Raises IndexError outside the split."""
        question = str(self._entry(split, index)["question"])
        return Prompt(split, index, self._shown + question, self._prefill)

    def score(self, prompt: Prompt, response: str) -> Score:
        """The data set's own score, from 0 to 1, of the response without the blanks around it."""
        answer: str | None = response.strip()
        reason = ""
        if self.dataset in _EVALUATES_EXPRESSIONS and not is_arithmetic(response):
            answer, reason = None, "the response is no plain expression"
        return Score(float(self._score_answer(answer, self._entry(prompt.split, prompt.index))), reason)

    def samples(self, prompt: Prompt) -> list[tuple[str, float]]:
        """The entry's own answer, where it has one."""
        answer = self._entry(prompt.split, prompt.index).get("answer")
        return [(answer, 1.0)] if isinstance(answer, str) and answer else []

    def _make_entry(self, split: Split, index: int) -> dict[str, Any]:
        size = self.train_size if split == "train" else self.heldout_size
        if not 0 <= index < size:
            raise IndexError(f"no prompt {index}")
        if self._entries is None:
            raise RuntimeError("a data set of reasoning_gym is set up in the scorer's process only")
        return self._at(index + (self.train_size if split == "heldout" else 0))

    def _shot(self, number: int) -> str:
        """A worked example. Raises ValueError for a data set whose entries have no answer to show."""
        entry = self._at(self.train_size + self.heldout_size + number)
        answer = entry.get("answer")
        if not isinstance(answer, str) or not answer:
            raise ValueError(f"the entries of {self.dataset!r} have no answer that could be shown: leave shots out")
        begun = f"{self._prefill} " if self._prefill else ""
        return f"{entry['question']}\n{begun}{answer}\n\n"

    def _at(self, place: int) -> dict[str, Any]:
        # list_functions draws from the interpreter's own generator: unseeded, a restarted worker would score responses
        # to one puzzle as answers to another.
        random.seed(f"{self._seed}/{place}")
        return cast("dict[str, Any]", self._entries[place])


@contextmanager
def _without_plots() -> Iterator[None]:
    """Keep matplotlib from being imported: one library of the library's names it, to draw what nobody asks for here.

    It is more than half of the time to load, and wants a folder to write to.
    """
    if any(name in sys.modules for name in _PLOTS):
        yield
        return
    stubs = {name: ModuleType(name) for name in _PLOTS}
    for name, stub in stubs.items():
        package, _, last = name.rpartition(".")
        if package:
            setattr(stubs[package], last, stub)
    vars(stubs["mpl_toolkits.mplot3d"])["Axes3D"] = None
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in _PLOTS:
            del sys.modules[name]


def is_arithmetic(text: str) -> bool:
    """True when `text` holds numbers, operators, brackets, one-letter variables and known functions, and no more.

    Nor may it be very long or hold a power of a power, `9**9**9`: no answer does, and to work it out costs the worker.
    """
    if len(text) > EXPRESSION_CHARACTERS_MAX or _NOT_ARITHMETIC.search(text) or _TOWER.search(text):
        return False
    return all(len(word) == 1 or word in _NAMES for word in _WORD.findall(re.sub(r"[0-9.]+[eE][+-]?[0-9]+", "1", text)))
