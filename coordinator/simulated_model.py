"""What a simulation has in the place of a task, of a model's tokeniser, and of a policy that plays a game."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from echo2.p2p.codec import unpack_tokens
from echo2.tasks.dice import Dice
from echo2.tasks.model_card import ModelCard
from echo2.tasks.task import Prompt, Score, Split
from echo2.tasks.token_text import TokenText

if TYPE_CHECKING:
    from collections.abc import Sequence

STOP = 10
SYMBOLS = (*"0123456789", "<stop>", "+", "=")


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


@cache
def simulated_text() -> TokenText:
    """Digits as tokens 0-9, then the end of a turn, plus and equals."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(SYMBOLS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SYMBOLS[STOP], special=True, normalized=False)])
    data = tokenizer.to_str().encode()
    card = ModelCard(
        name="simulated",
        architecture="llama",
        tokenizer_sha256=hashlib.sha256(data).hexdigest(),
        vocabulary_size=len(SYMBOLS),
        context_tokens=64,
        stop_ids=(STOP,),
        special_ids=(STOP,),
    )
    return TokenText(card, data)


def race_turn(seed: bytes, sample: int, drawn: int, prompt_tokens: bytes, tokens_max: int) -> Sequence[int]:
    """A turn of the race to a number: mostly a legal one, now and then one without an end."""
    dice = Dice(seed, f"{sample}/{drawn}")
    (history,) = simulated_text().decode([unpack_tokens(prompt_tokens).tolist()[-5:]])
    before, _, step = history.rstrip("=").rpartition("+")
    tokens = [int(digit) for digit in str(int(before) + int(step) + 1 + dice.below(3))]
    return [*tokens, STOP] if dice.happens(90) else tokens * tokens_max
