"""Sums of a two-digit and a one-digit number: the task a tiny model can learn on a CPU in minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .task import Prompt, Score

if TYPE_CHECKING:
    from .task import Split

_SUMS = tuple((a, b) for a in range(10, 100) for b in range(10))
"""All 900 of them, in order."""


def _is_heldout(a: int, b: int) -> bool:
    """One in three: every pair of units digit and addend is held out for three of the nine tens digits.

    Not (a + b) % 3, which would hold out exactly the answers divisible by three: then no training prompt would ever
    show those answers, and the evaluation would measure something else.
    """
    return (a + 2 * b) % 3 == 0


_SPLITS: dict[Split, tuple[tuple[int, int], ...]] = {
    "train": tuple(pair for pair in _SUMS if not _is_heldout(*pair)),
    "heldout": tuple(pair for pair in _SUMS if _is_heldout(*pair)),
}


class Arithmetic:
    """`47+8=` is answered by `55`: reward 1 for exactly that, spaces around it aside, else 0."""

    name = "arithmetic"
    train_size = len(_SPLITS["train"])
    heldout_size = len(_SPLITS["heldout"])

    def prompt(self, split: Split, index: int) -> Prompt:
        """Prompt `index` of `split`. Raises IndexError outside it."""
        a, b = self._operands(split, index)
        return Prompt(split, index, f"{a}+{b}=")

    def answer(self, split: Split, index: int) -> str:
        """The right response: for scoring, and for whoever writes demonstrations."""
        a, b = self._operands(split, index)
        return str(a + b)

    def score(self, prompt: Prompt, response: str) -> Score:
        """R(x, y): 1 if y, stripped, is the sum in plain decimal digits."""
        return Score(1.0 if response.strip() == self.answer(prompt.split, prompt.index) else 0.0)

    def samples(self, prompt: Prompt) -> list[tuple[str, float]]:
        """The sum, and one more than the sum."""
        answer = self.answer(prompt.split, prompt.index)
        return [(answer, 1.0), (str(int(answer) + 1), 0.0)]

    @staticmethod
    def _operands(split: Split, index: int) -> tuple[int, int]:
        if index < 0:
            raise IndexError(f"no prompt {index}")
        return _SPLITS[split][index]
