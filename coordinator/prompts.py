"""From an ordinal to the tokens of its prompt, and from a response's tokens to its text."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

from tokenizers import Tokenizer

from echo2.p2p.codec import pack_tokens, unpack_tokens
from echo2.p2p.errors import ConfigurationError
from echo2.tasks.curriculum import train_index
from echo2.tasks.model_card import TOKENIZER_FILE, load_model_card

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from echo2.tasks.model_card import ModelCard
    from echo2.tasks.task import Prompt, Split, Task

PROMPTS_CHECKED = 256
"""Prompts of each split that are tried at start-up: enough to meet every symbol of a task, done in milliseconds."""

PROMPTS_CACHED = 16_384
"""Tokenised prompts kept: more than are ever under way at once, a few MiB."""


class ModelText(Protocol):
    """A model's text: its card and tokeniser."""

    @property
    def card(self) -> ModelCard:
        """What the model folder says of the model."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text that holds the template's markers; none are added."""

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several responses, special tokens left out."""


class FolderText:
    """The text of a model folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self.card = load_model_card(folder)
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ConfigurationError(str(error)) from error
        self._special = frozenset(self.card.special_ids)

    def encode(self, text: str) -> Sequence[int]:
        """As `ModelText.encode`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """As `ModelText.decode`. The card's special ids are left out even where the tokeniser knows them as words."""
        special = self._special
        plain = [[token for token in response if token not in special] for response in tokens]
        texts: list[str] = self._tokenizer.decode_batch(plain, skip_special_tokens=True)
        return texts


def check_prompts(task: Task, text: ModelText) -> None:
    """Raise ConfigurationError when the model's tokeniser drops or changes what the task asks.

    A tokeniser without an unknown token leaves out, silently, what it has no symbol for. Blanks are not compared: some
    tokenisers add or merge them, and no question turns on that.
    """
    sizes: dict[Split, int] = {"train": task.train_size, "heldout": task.heldout_size}
    for split, size in sizes.items():
        for index in range(min(size, PROMPTS_CHECKED)):
            prompt = task.prompt(split, index)
            whole = prompt.text + prompt.prefill
            (came_back,) = text.decode([text.encode(whole)])
            if "".join(came_back.split()) != "".join(whole.split()):
                lost = "".join(dict.fromkeys(symbol for symbol in whole if symbol not in came_back))
                what = f"loses {lost[:64]!r}" if lost else f"makes {came_back[:100]!r} of it"
                raise ConfigurationError(
                    f"the model {text.card.name} cannot read the task {task.name}: of {split} prompt {index}, "
                    f"{whole[:100]!r}, its tokenizer {what}; choose another task or model"
                )


class PromptBook:
    """The prompts of one run. Pure apart from its cache."""

    def __init__(self, *, run: str, task: Task, text: ModelText, seed: int, secret: bytes) -> None:
        self.task = task
        self.text = text
        self._run = run
        self._seed = seed
        self._secret = secret
        self._encoded = lru_cache(maxsize=PROMPTS_CACHED)(self._encode)

    def prompt(self, kind: Literal["train", "eval"], ordinal: int) -> Prompt:
        """Training ordinals follow the curriculum; an evaluation's ordinal is the held-out index itself."""
        if kind == "eval":
            return self.task.prompt("heldout", ordinal)
        return self.task.prompt("train", train_index(self._seed, ordinal, self.task.train_size))

    def tokens(self, kind: Literal["train", "eval"], ordinal: int) -> bytes:
        """The prompt in its template, as raw int32."""
        return self._encoded(kind, ordinal)

    def seed(self, kind: Literal["train", "eval"], ordinal: int) -> bytes:
        """HMAC-SHA256 of run, kind and ordinal under the coordinator's secret: a reissue keeps it, nobody picks it."""
        return hmac.digest(self._secret, f"{self._run}\0{kind}\0{ordinal}".encode(), hashlib.sha256)

    def decode(self, responses: Sequence[bytes]) -> list[str]:
        """Texts of responses given as raw int32."""
        return self.text.decode([unpack_tokens(response).tolist() for response in responses])

    def _encode(self, kind: Literal["train", "eval"], ordinal: int) -> bytes:
        prompt = self.prompt(kind, ordinal)
        return pack_tokens(self.text.encode(self.text.card.wrap(prompt.text) + prompt.prefill))
