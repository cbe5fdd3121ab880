"""The card of a model folder: strict to read, bound to its tokeniser."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from echo2.tasks.model_card import CARD_FILE, TOKENIZER_FILE, ModelCard, load_model_card, write_model_card

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER = b'{"model": {}}'


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "name": "toy",
        "architecture": "llama",
        "tokenizer_sha256": hashlib.sha256(TOKENIZER).hexdigest(),
        "vocabulary_size": 15,
        "context_tokens": 64,
        "stop_ids": [2],
        "prompt_prefix": "<bos>",
        "prompt_suffix": "",
        "special_ids": [0, 1, 2],
        **changes,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / TOKENIZER_FILE).write_bytes(TOKENIZER)
    (tmp_path / CARD_FILE).write_text(json.dumps(fields()))
    return tmp_path


def test_a_card_is_read_as_written(folder: Path) -> None:
    """What is written into a folder is what is loaded from it."""
    card = load_model_card(folder)
    assert card == ModelCard.model_validate_json(json.dumps(fields()))
    assert card.stop_ids == (2,)
    write_model_card(folder, card)
    assert load_model_card(folder) == card


def test_a_prompt_is_wrapped() -> None:
    """Prefix and suffix stand around the task's text."""
    card = ModelCard.model_validate_json(json.dumps(fields(prompt_prefix="<", prompt_suffix=">")))
    assert card.wrap("1+1=") == "<1+1=>"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architecture": "gpt2"}, "architecture"),
        ({"stop_ids": []}, "stop_ids"),
        ({"stop_ids": [15]}, r"\[15\] are not below"),
        ({"special_ids": [99]}, r"\[99\] are not below"),
        ({"vocabulary_size": "15"}, "vocabulary_size"),
        ({"context_tokens": 0}, "context_tokens"),
        ({"tokenizer_sha256": "abc"}, "tokenizer_sha256"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_malformed_card_is_refused_by_field(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    """Whatever is wrong in a card, the message is one line that names it."""
    (folder / CARD_FILE).write_text(json.dumps(fields(**changes)))
    with pytest.raises(ValueError, match=complaint) as caught:
        load_model_card(folder)
    assert "\n" not in str(caught.value)


def test_a_card_that_is_not_json_is_refused(folder: Path) -> None:
    """Cut-off JSON is a malformed card, not a crash."""
    (folder / CARD_FILE).write_text('{"name": ')
    with pytest.raises(ValueError, match="not a valid model card"):
        load_model_card(folder)


def test_a_huge_card_is_refused_unread(folder: Path) -> None:
    """A file of another order of size is not a card."""
    (folder / CARD_FILE).write_bytes(b" " * 100_000)
    with pytest.raises(ValueError, match="larger than"):
        load_model_card(folder)


@pytest.mark.parametrize("missing", [CARD_FILE, TOKENIZER_FILE])
def test_a_folder_that_lacks_a_file_is_no_model_folder(folder: Path, missing: str) -> None:
    """The message names the missing file and how to make a folder."""
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"has no {missing}; make one with"):
        load_model_card(folder)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    """One changed byte of the tokeniser is found: token ids would silently differ."""
    (folder / TOKENIZER_FILE).write_bytes(TOKENIZER + b"\n")
    with pytest.raises(ValueError, match="not the tokenizer of its card"):
        load_model_card(folder)
