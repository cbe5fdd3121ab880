"""The card of a model folder: what the coordinator must know to tokenise and decode, without torch or llama.cpp.

A model folder holds `config.json`, `model.safetensors` (both as Hugging Face writes them), `tokenizer.json` and the
card, `echo2-model.json`. The card names the hash of `tokenizer.json`: two processes whose tokenisers differ by one byte
would agree on text and silently disagree on token ids.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

if TYPE_CHECKING:
    from pathlib import Path

CARD_FILE = "echo2-model.json"
TOKENIZER_FILE = "tokenizer.json"

CARD_BYTES_MAX = 64 * 1024
"""A card is under 1 KiB; anything of another order is some other file under this name."""

CONTEXT_TOKENS_MAX = 131_072
"""As the wire's bound on a prompt or response (`p2p.messages.TOKENS_MAX`), which this layer cannot import."""

TokenId = Annotated[int, Field(ge=0, lt=10_000_000)]


class ModelCard(BaseModel):
    """What a model's user must know of it. `prompt_prefix` and `prompt_suffix` are text around a task's prompt.

    `turn_prefix` and `turn_suffix` are put around what an environment answers between two turns of the policy; the
    first closes the policy's turn, whose stop id is already there.
    A template's markers (`<bos>`, `<|im_start|>`) are written as text: the tokeniser knows them as special tokens.
    `special_ids` are left out when a response is decoded; a response ends with one of `stop_ids`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    architecture: Literal["llama", "qwen2", "qwen3"]
    tokenizer_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    vocabulary_size: Annotated[int, Field(ge=2, le=10_000_000)]
    context_tokens: Annotated[int, Field(ge=8, le=CONTEXT_TOKENS_MAX)]
    stop_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=16)]
    prompt_prefix: Annotated[str, Field(max_length=16_384)] = ""
    prompt_suffix: Annotated[str, Field(max_length=16_384)] = ""
    turn_prefix: Annotated[str, Field(max_length=16_384)] = ""
    turn_suffix: Annotated[str, Field(max_length=16_384)] = ""
    special_ids: Annotated[tuple[TokenId, ...], Field(max_length=4096)] = ()

    @model_validator(mode="after")
    def _ids_are_in_the_vocabulary(self) -> ModelCard:
        outside = [i for i in (*self.stop_ids, *self.special_ids) if i >= self.vocabulary_size]
        if outside:
            raise ValueError(f"token ids {outside} are not below vocabulary_size {self.vocabulary_size}")
        return self

    def wrap(self, text: str) -> str:
        """The text a tokeniser is given for the prompt `text`."""
        return f"{self.prompt_prefix}{text}{self.prompt_suffix}"


def tokenizer_sha256(folder: Path) -> str:
    """SHA-256 of the bytes of `tokenizer.json`, in hexadecimal."""
    return hashlib.sha256((folder / TOKENIZER_FILE).read_bytes()).hexdigest()


def write_model_card(folder: Path, card: ModelCard) -> Path:
    """Writes the card into its model folder."""
    path = folder / CARD_FILE
    path.write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def load_model_card(folder: Path) -> ModelCard:
    """The card of a model folder, checked against the tokeniser that lies beside it.

    Raises ValueError, its message fit to show a person, when the folder has no card, the card is malformed, or the
    tokeniser is not the one the card was written for.
    """
    path = folder / CARD_FILE
    try:
        if path.stat().st_size > CARD_BYTES_MAX:
            raise ValueError(f"{path} is larger than {CARD_BYTES_MAX} bytes, so it is not a model card")
        card = ModelCard.model_validate_json(path.read_bytes())
        digest = tokenizer_sha256(folder)
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} is not a model folder: it has no {error.filename and _name(error.filename)}; "
            "make one with `echo2-learner prepare`"
        ) from error
    except OSError as error:
        raise ValueError(f"the model folder {folder} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ValueError(f"{path} is not a valid model card: {_first(error)}") from error
    if digest != card.tokenizer_sha256:
        raise ValueError(
            f"{folder / TOKENIZER_FILE} is not the tokenizer of its card (sha256 {digest[:16]}..., the card says "
            f"{card.tokenizer_sha256[:16]}...); prepare the folder again"
        )
    return card


def _name(filename: object) -> str:
    return str(filename).replace("\\", "/").rsplit("/", 1)[-1]


def _first(error: ValidationError) -> str:
    """The first complaint in one line; the card's reader mends one thing at a time."""
    detail = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in detail["loc"])
    return f"{where}: {detail['msg']}" if where else detail["msg"]
