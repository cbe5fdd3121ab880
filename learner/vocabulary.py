"""A tokeniser in llama.cpp's terms, or the reason why llama.cpp would not give the same token ids.

`tokenizer.ggml.pre` names the pre-tokeniser by a word; the wrong word gives other token ids, not an error. So the word
is chosen only when what `tokenizer.json` does before BPE is known to be the same, and tested against llama.cpp.

The pool itself never depends on it: coordinator and nodes turn text into tokens with the run's own tokenizer.json. A
snapshot is to be right in llama.cpp all the same, where people will try it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import gguf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.model_card import TOKENIZER_FILE, load_model_card

from .reading import read_table, reading

if TYPE_CHECKING:
    from pathlib import Path

CHAT_TEMPLATE_FILE = "chat_template.jinja"

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_BYTES = {**_BYTE_LEVEL, "use_regex": False}


def _split(digits: str) -> dict[str, Any]:
    """The pattern of GPT-4's tokeniser, which Llama 3 and Qwen took over but for how many digits stay together."""
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """llama.cpp's word, and what it does: these steps, and merges passed over for words that are in the vocabulary."""

    name: str
    steps: list[dict[str, Any]]
    ignore_merges: bool = False


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _AddedToken(_Part):
    id: Annotated[int, Field(ge=0)]
    content: str
    special: bool


class _Bpe(_Part):
    vocab: Annotated[dict[str, Annotated[int, Field(ge=0)]], Field(min_length=1)]
    merges: list[str | Annotated[list[str], Field(min_length=2, max_length=2)]]


class _BpeTokenizer(_Part):
    """What is read of a tokenizer.json of byte-level BPE."""

    model: _Bpe


class _Model(_Part):
    type: str


class _Tokenizer(_Part):
    """What is read of any tokenizer.json. The rest is for the library to judge."""

    added_tokens: list[_AddedToken]
    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


_PRE_TOKENIZERS = (
    _PreTokenizer("gpt-2", [_BYTE_LEVEL]),
    _PreTokenizer("smollm", [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]),
    _PreTokenizer("qwen2", [_split(r"\p{N}"), _BYTES]),
    _PreTokenizer("llama-bpe", [_split(r"\p{N}{1,3}"), _BYTES], ignore_merges=True),
)

_INERT_MERGES = ["<none> <none>"]
"""llama.cpp refuses a BPE vocabulary without merges. This one can never apply: BPE starts from single characters."""


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Read once a run: SmolLM2's takes longer to parse than a tiny export. `end_id` is the end of a response."""

    name: str
    context_tokens: int
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    end_id: int
    chat_template: str = ""


def load_vocabulary(folder: Path) -> GgufVocabulary:
    """The vocabulary of a model folder.

    Raises ConfigurationError when its tokeniser is not one that llama.cpp is known to reproduce.
    """
    try:
        card = load_model_card(folder)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    data = read_tokenizer(folder / TOKENIZER_FILE)
    model = data["model"]
    tokens = [f"[PAD{i}]" for i in range(card.vocabulary_size)]
    types = [int(gguf.TokenType.UNUSED)] * card.vocabulary_size
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, int(gguf.TokenType.NORMAL)
    for added in data["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    template = folder / CHAT_TEMPLATE_FILE
    chat_template = ""
    if template.is_file():
        with reading(template):
            chat_template = template.read_text(encoding="utf-8")
    return GgufVocabulary(
        name=card.name,
        context_tokens=card.context_tokens,
        pre=_pre_tokenizer(data, folder / TOKENIZER_FILE).name,
        tokens=tuple(tokens),
        types=tuple(types),
        merges=tuple(merges or _INERT_MERGES),
        end_id=card.stop_ids[0],
        chat_template=chat_template,
    )


def read_tokenizer(path: Path) -> dict[str, Any]:
    """What a `tokenizer.json` says. Raises ConfigurationError unless llama.cpp gives the same ids."""
    data = read_table(path)
    try:
        _Tokenizer.model_validate(data)
        with reading(path, "is not a tokenizer.json"):
            _pre_tokenizer(data, path)
        _BpeTokenizer.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{path} is not a tokenizer.json: {where}: {first['msg']}") from error
    return data


def _pre_tokenizer(data: dict[str, Any], path: Path) -> _PreTokenizer:
    """llama.cpp's pre-tokeniser that does the same. Raises ConfigurationError when none does."""
    model = data["model"]
    known = _known_steps(data.get("pre_tokenizer"))
    if model["type"] != "BPE" or known is None:
        reason = f"split like one of {', '.join(each.name for each in _PRE_TOKENIZERS)}"
    elif not _is_inert(data.get("normalizer")):
        reason = "without a normalizer (or NFC)"
    elif bool(model.get("ignore_merges")) != known.ignore_merges:
        reason = f"with ignore_merges = {str(known.ignore_merges).lower()}, as llama.cpp has it for {known.name}"
    elif any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")):
        reason = "without dropout, prefixes, suffixes or byte_fallback"
    elif any(added.get(key) for added in data["added_tokens"] for key in ("lstrip", "rstrip", "single_word")):
        reason = "without added tokens that take in the spaces around them or stand for whole words only"
    else:
        return known
    raise ConfigurationError(
        f"{path} is not a tokenizer that can be exported: it must be byte-level BPE, {reason}; llama.cpp would make "
        "other tokens of the same text"
    )


def _is_inert(normalizer: dict[str, Any] | None) -> bool:
    """NFC leaves nearly all text as it is, and llama.cpp does without it for Qwen too: the same ids for text in NFC."""
    return normalizer is None or normalizer == {"type": "NFC"}


def _known_steps(pre_tokenizer: dict[str, Any] | None) -> _PreTokenizer | None:
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    # Offsets of characters only: no effect on ids.
    steps = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    return next((known for known in _PRE_TOKENIZERS if known.steps == steps), None)
