"""Text to tokens and back, from the bytes of a tokenizer.json."""

from __future__ import annotations

import hashlib

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from echo2.tasks.model_card import ModelCard, write_model_card
from echo2.tasks.token_text import TokenText

END = "<end>"


def tokenizer_json():
    """One token a byte of a few letters, and one marker."""
    vocabulary = {symbol: number for number, symbol in enumerate([END, *"abcden<>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer.to_str().encode()


def card(data, **changes):
    known = {"name": "letters", "architecture": "llama", "tokenizer_sha256": hashlib.sha256(data).hexdigest()}
    return ModelCard(**known | {"vocabulary_size": 9, "context_tokens": 64, "stop_ids": (0,)} | changes)


def test_a_marker_is_a_marker_only_where_we_wrote_it():
    """In a template's text it is one token; in an environment's text it is its letters."""
    data = tokenizer_json()
    text = TokenText(card(data), data)
    assert text.encode(f"ab{END}") == [1, 2, 0]
    assert text.encode_plain(f"ab{END}") == [1, 2, 7, 5, 6, 4, 8]


def test_special_tokens_are_left_out_of_what_was_said():
    """The tokenizer's own, and those that only the card calls special."""
    data = tokenizer_json()
    assert TokenText(card(data), data).decode([[1, 2, 0], [3]]) == ["ab", "c"]
    assert TokenText(card(data, special_ids=(2,)), data).decode([[1, 2, 0]]) == ["a"]


def test_another_tokenizer_than_the_cards_is_refused():
    """One byte of difference may be one token of difference."""
    data = tokenizer_json()
    with pytest.raises(ValueError, match="not the one of the card"):
        TokenText(card(data), data + b" ")
    with pytest.raises(ValueError, match="cannot be read"):
        TokenText(card(b"no json"), b"no json")


def test_a_folder_gives_the_same_text(tmp_path):
    """What the coordinator reads from a folder, a node gets as bytes."""
    data = tokenizer_json()
    (tmp_path / "tokenizer.json").write_bytes(data)
    write_model_card(tmp_path, card(data, turn_prefix="a", turn_suffix="b"))
    text = TokenText.of_folder(tmp_path)
    assert text.card.turn_prefix == "a"
    assert text.tokenizer_json == data
    assert text.encode("abc") == [1, 2, 3]
