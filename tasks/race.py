"""The race to a number: a two-player game so small that a model of a million parameters can learn it turn by turn.

The players take turns at raising a total by 1, 2 or 3; who says the target wins. The policy is told the total and what
its opponent added to it, as the sum `21+2=`, and says the new total, `25`. Whoever leaves the opponent a multiple of 4
below the target has won, if it knows. The opponent knows in half of its turns, and else adds what chance says.

Reward: 1 for a win; `LOST_REWARD` for a game lost by the rules; 0 for a number that is against them.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from .dice import Dice
from .options import whole_number
from .sandbox import EPISODES_MAX, Observation

STEP_MAX = 3
TARGET_MIN, TARGET_MAX = 20, 99
"""Two digits throughout: the total at the start is at least 10."""

LEAD_MAX = 10
"""The first total is 1 .. 10 below the target, the opponent's first step included: some games are decided at once,
which is what a beginner learns from, and none takes the policy more than five turns."""

LOST_REWARD = 0.2
"""Playing by the rules is worth something: else a beginner, who loses every game, could not learn them."""

KNOWING_PERCENT = 50

ACTION_CHARACTERS_MAX = 400

_NUMBER = re.compile(r"[0-9]+")

Language = Literal["symbols", "words"]


class Race:
    """The task. In `symbols` an observation is a sum, for a model that reads nothing else; in `words` it has rules."""

    name = "race"
    prefill = ""
    turns_max = LEAD_MAX // 2

    def __init__(
        self, *, target: int = 29, language: Language = "symbols", train_size: int = 10_000, heldout_size: int = 128
    ) -> None:
        """Raises ValueError, fit to show a person, for an option out of bounds."""
        if language not in get_args(Language):
            raise ValueError(f"language must be one of {', '.join(get_args(Language))}, not {str(language)[:64]!r}")
        self.train_size = whole_number("train_size", train_size, low=1, high=EPISODES_MAX)
        self.heldout_size = whole_number("heldout_size", heldout_size, low=1, high=EPISODES_MAX)
        self._target = whole_number("target", target, low=TARGET_MIN, high=TARGET_MAX)
        self._language = language

    def sandbox(self) -> RaceGame:
        """A fresh game."""
        return RaceGame(self._target, self._language)


class RaceGame:
    """One game. The total is whole after the opponent's step: what the policy is asked to raise."""

    def __init__(self, target: int, language: Language) -> None:
        self._target = target
        self._language = language
        self._total: int | None = None
        self._turns = 0

    def reset(self, seed: bytes) -> Observation:
        """See `sandbox.Sandbox.reset`."""
        self._dice = Dice(seed, "race")
        self._turns = 0
        step = 1 + self._dice.below(STEP_MAX)
        self._total = self._target - 1 - self._dice.below(LEAD_MAX)
        opening = self._asks(self._total - step, step)
        if self._language == "symbols":
            return opening
        return Observation(
            f"A race to {self._target}. We take turns: each of us adds 1, 2 or 3 to the total, and who says "
            f"{self._target} wins.\n{opening.text}"
        )

    def step(self, action: str) -> Observation:
        """See `sandbox.Sandbox.step`. The last number in the action counts."""
        total = self._open()
        self._turns += 1
        numbers = _NUMBER.findall(action[-ACTION_CHARACTERS_MAX:])
        said = int(numbers[-1][:3]) if numbers else 0  # three digits are too large, and so are more
        if not total < said <= min(total + STEP_MAX, self._target):
            return self._end("That was against the rules.", 0.0, broken=True)
        if said == self._target:
            return self._end("You win.", 1.0)
        step = self._reply(said)
        self._total = said + step
        if self._total == self._target:
            return self._end(f"I add {step} and win.", LOST_REWARD)
        return self._asks(said, step)

    def truncate(self) -> Observation:
        """See `sandbox.Sandbox.truncate`. Saying nothing is against the rules."""
        self._open()
        return self._end("No number came.", 0.0, broken=True)

    def _open(self) -> int:
        if self._total is None:
            raise ValueError("the game is over, or was never begun")
        return self._total

    def _reply(self, said: int) -> int:
        """The opponent's step; the dice roll the same way whatever it does with them."""
        knows, chance = self._dice.happens(KNOWING_PERCENT), 1 + self._dice.below(STEP_MAX)
        best = (self._target - said) % (STEP_MAX + 1)
        return best if knows and best else min(chance, self._target - said)

    def _asks(self, before: int, step: int) -> Observation:
        if self._language == "symbols":
            return Observation(f"{before}+{step}=")
        return Observation(f"The total was {before} and I add {step}. Which total do you say?")

    def _end(self, text: str, reward: float, *, broken: bool = False) -> Observation:
        self._total = None
        details = {"wins": float(reward == 1.0), "rules_broken": float(broken), "turns": float(self._turns)}
        return Observation(text, done=True, reward=reward, details=details)
