"""What a researcher writes: prompts and a reward. Everything else of the system works from this protocol alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Split = Literal["train", "heldout"]


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
