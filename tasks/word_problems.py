"""Short arithmetic word problems, made from templates: a task for small instruction-tuned models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .task import Prompt, Score

if TYPE_CHECKING:
    from collections.abc import Callable

    from .task import Split


@dataclass(frozen=True, slots=True)
class _Template:
    text: str
    answer: Callable[[int, int], int]


_TEMPLATES = (
    _Template("{name} has {a} {things}. {name} buys {b} more. How many {things} does {name} have?", lambda a, b: a + b),
    _Template("{name} had {a} {things} and gave away {b}. How many {things} are left?", lambda a, b: a - b),
    _Template("There are {b} boxes with {a} {things} each. How many {things} are there in all?", lambda a, b: a * b),
    _Template("{name} reads {b} pages a day for {a} days. How many pages is that?", lambda a, b: a * b),
    _Template(
        "{name} has {a} {things}. A friend has {b} fewer. How many {things} do they have together?",
        lambda a, b: 2 * a - b,
    ),
    _Template(
        "A shelf holds {a} {things}. {b} are sold and then {b} more are sold. How many {things} remain?",
        lambda a, b: a - 2 * b,
    ),
    _Template("{name} is {a} years old. How old will {name} be in {b} years?", lambda a, b: a + b),
    _Template(
        "{name} picks {a} {things} in the morning and {b} in the afternoon, then loses one. "
        "How many {things} does {name} have?",
        lambda a, b: a + b - 1,
    ),
)

_NAMES = ("Anna", "Ben", "Chen", "Dana", "Emil", "Fatima", "Gita", "Hugo", "Ines", "Juma", "Kofi")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells")
_INSTRUCTION = " Answer with one number."

_FIRST = range(20, 70)
_SECOND = range(2, 10)
_HELDOUT_ONE_IN = 16

RESPONSE_CHARACTERS_MAX = 4096
"""Only this much of the end of a response is searched: the answer stands last, and the time to look is bounded."""

_NUMBER = re.compile(r"(?:(?<![0-9A-Za-z)])[-\u2212])?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
"""No part can match what a neighbouring part matches, so there is nothing to backtrack over: linear time.

A minus belongs to the number only when it does not stand between two operands, as in `12-5`.
"""


def _problems(*, heldout: bool) -> tuple[tuple[int, int, int], ...]:
    """(template, a, b) of one split: each template and each number appears in both, no triple does."""
    return tuple(
        (t, a, b)
        for t in range(len(_TEMPLATES))
        for a in _FIRST
        for b in _SECOND
        if ((a + 3 * b + 5 * t) % _HELDOUT_ONE_IN == 0) is heldout
    )


_SPLITS: dict[Split, tuple[tuple[int, int, int], ...]] = {
    "train": _problems(heldout=False),
    "heldout": _problems(heldout=True),
}


class WordProblems:
    """Reward 1 if the last number in the response is the answer, else 0."""

    name = "word-problems"
    train_size = len(_SPLITS["train"])
    heldout_size = len(_SPLITS["heldout"])

    def prompt(self, split: Split, index: int) -> Prompt:
        """Prompt `index` of `split`. Raises IndexError outside it."""
        t, a, b = self._problem(split, index)
        name = _NAMES[(7 * a + 3 * b + t) % len(_NAMES)]
        things = _THINGS[(a + 2 * b + t) % len(_THINGS)]
        return Prompt(split, index, _TEMPLATES[t].text.format(a=a, b=b, name=name, things=things) + _INSTRUCTION)

    def answer(self, split: Split, index: int) -> str:
        """The right number in plain decimal digits."""
        t, a, b = self._problem(split, index)
        return str(_TEMPLATES[t].answer(a, b))

    def score(self, prompt: Prompt, response: str) -> Score:
        """R(x, y). A response with no number at all earns 0 like any other miss."""
        return Score(1.0 if last_number(response) == self.answer(prompt.split, prompt.index) else 0.0)

    @staticmethod
    def _problem(split: Split, index: int) -> tuple[int, int, int]:
        if index < 0:
            raise IndexError(f"no prompt {index}")
        return _SPLITS[split][index]


def last_number(text: str) -> str | None:
    """The last number in the end of `text`, without grouping commas, leading zeros or a zero fraction.

    Kept as text: int() refuses, and takes quadratic time on, a number of many thousand digits.
    """
    matches = _NUMBER.findall(text[-RESPONSE_CHARACTERS_MAX:])
    if not matches:
        return None
    number = str(matches[-1]).replace(",", "").replace("\u2212", "-")
    sign = "-" if number.startswith("-") else ""
    whole, _, fraction = number.lstrip("-").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    if whole == "0" and not fraction:
        return "0"
    return sign + whole + (f".{fraction}" if fraction else "")
