"""Text to tokens and back, the same on both sides of the wire: the coordinator and, in multi-turn runs, the node.

Both have the same `tokenizer.json` (its hash is in the card and in the run's signed descriptor) and the same library:
what a node inserted between two turns the coordinator inserts too, token for token, when it replays the episode.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer

from .model_card import TOKENIZER_FILE, load_model_card

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .model_card import ModelCard


class ModelText(Protocol):
    """A model's text: its card and tokeniser."""

    @property
    def card(self) -> ModelCard:
        """What the model folder says of the model."""

    @property
    def tokenizer_json(self) -> bytes:
        """The tokeniser's file, for nodes of a multi-turn run."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text that holds the template's markers; none are added."""

    def encode_plain(self, text: str) -> Sequence[int]:
        """Token ids of a text in which a marker is but its letters: what comes from an environment."""

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several responses, special tokens left out."""


class TokenText:
    """The text of a card and its tokeniser's bytes. Raises ValueError when the two do not belong together."""

    def __init__(self, card: ModelCard, tokenizer_json: bytes) -> None:
        digest = hashlib.sha256(tokenizer_json).hexdigest()
        if digest != card.tokenizer_sha256:
            raise ValueError(f"the tokenizer is not the one of the card of {card.name} (sha256 {digest[:16]}...)")
        self.card = card
        self.tokenizer_json = tokenizer_json
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
            self._plain = Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ValueError(f"the tokenizer of {card.name} cannot be read: {error}") from error
        self._plain.encode_special_tokens = True
        self._special = frozenset(card.special_ids)

    @classmethod
    def of_folder(cls, folder: Path) -> TokenText:
        """The text of a model folder. Raises ValueError, fit to show a person."""
        card = load_model_card(folder)
        return cls(card, (folder / TOKENIZER_FILE).read_bytes())

    def encode(self, text: str) -> list[int]:
        """As `ModelText.encode`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """As `ModelText.encode_plain`."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """As `ModelText.decode`. The card's special ids are left out even where the tokeniser knows them as words."""
        special = self._special
        plain = [[token for token in response if token not in special] for response in tokens]
        texts: list[str] = self._tokenizer.decode_batch(plain, skip_special_tokens=True)
        return texts
