"""Short arithmetic word problems, made from templates: a task for small instruction-tuned models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .task import Prompt, Score

if TYPE_CHECKING:
    from .task import Split


_TEMPLATES = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have?", "+"),
    ("{name} had {a} {things} and gave away {b}. How many {things} are left?", "-"),
    ("{name} is {a} years old. How old will {name} be in {b} years?", "+"),
    ("A shelf holds {a} {things}. {b} are sold. How many {things} remain?", "-"),
    ("{name} picks {a} {things} in the morning and {b} in the afternoon. How many {things} is that?", "+"),
    ("Of {a} {things}, {b} are broken. How many {things} are whole?", "-"),
    ("{name} walks {a} km, then {b} km. How many km is that?", "+"),
    ("{name} has {a} coins and spends {b}. How many coins are left?", "-"),
)
"""Text and operation. The answer is begun for the model, `12 + 3 =`: one of a hundred million parameters, sampled at
temperature 1, rambles otherwise and is right so seldom that no group differs and nothing can be learned."""

_NAMES = ("Anna", "Ben", "Chen", "Dana", "Emil", "Fatima", "Gita", "Hugo", "Ines", "Juma", "Kofi")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells")

_FIRST = range(10, 30)
_SECOND = range(2, 10)
_HELDOUT_ONE_IN = 4

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
        text, operation = _TEMPLATES[t]
        return Prompt(split, index, text.format(a=a, b=b, name=name, things=things), prefill=f"{a} {operation} {b} =")

    def answer(self, split: Split, index: int) -> str:
        """The right number in plain decimal digits."""
        t, a, b = self._problem(split, index)
        return str(a + b if _TEMPLATES[t][1] == "+" else a - b)

    def score(self, prompt: Prompt, response: str) -> Score:
        """R(x, y). A response with no number at all earns 0 like any other miss."""
        return Score(1.0 if last_number(response) == self.answer(prompt.split, prompt.index) else 0.0)

    def samples(self, prompt: Prompt) -> list[tuple[str, float]]:
        """The number in a sentence, and the number with one more digit."""
        answer = self.answer(prompt.split, prompt.index)
        return [(f"The answer is {answer}.", 1.0), (f"{answer}1", 0.0)]

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
