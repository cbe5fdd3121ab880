"""What a simulation has in the place of a task and of a model's tokeniser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.tasks.model_card import ModelCard
from echo2.tasks.task import Prompt, Score, Split

if TYPE_CHECKING:
    from collections.abc import Sequence


class SimulatedTask:
    """As many prompts as the scenario asks; the reward is the parity of the response's length."""

    name = "simulated"
    train_size = 1000

    def __init__(self, heldout_size: int) -> None:
        self.heldout_size = heldout_size

    def prompt(self, split: Split, index: int) -> Prompt:
        """See `tasks.task.Task.prompt`."""
        return Prompt(split, index, str(index))

    def score(self, prompt: Prompt, response: str) -> Score:  # noqa: ARG002 - the protocol's signature
        """See `tasks.task.Task.score`."""
        return Score(float(len(response) % 2))


class SimulatedText:
    """Digits as tokens 0-9; token 10 ends a response."""

    card = ModelCard(
        name="simulated",
        architecture="llama",
        tokenizer_sha256="00" * 32,
        vocabulary_size=12,
        context_tokens=64,
        stop_ids=(10,),
        special_ids=(10,),
    )

    def encode(self, text: str) -> Sequence[int]:
        """See `prompts.ModelText.encode`."""
        return [int(digit) for digit in text]

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """See `prompts.ModelText.decode`."""
        return ["".join(str(token) for token in response if token != 10) for response in tokens]
