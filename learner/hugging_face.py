"""From a Hugging Face folder to a model folder of ours, and from what was trained back to a Hugging Face folder.

Everything that could not be published exactly as it would be trained is refused here, before a run begins: an
architecture or a rope that llama.cpp computes otherwise, a tokeniser it does not reproduce, weights that do not fit the
configuration. Weights keep their number format and are copied one tensor at a time.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.model_card import (
    CONTEXT_TOKENS_MAX,
    TOKENIZER_FILE,
    ModelCard,
    load_model_card,
    tokenizer_sha256,
    write_model_card,
)

from .architectures import EMBEDDING, OUTPUT, architecture_of, named_architecture, parameter_shapes
from .chat_template import TOKENIZER_CONFIG_FILE, ChatFormat, chat_format, read_chat_template
from .policy import CONFIG_FILE, WEIGHTS_FILE
from .reading import read_table, reading
from .vocabulary import CHAT_TEMPLATE_FILE, load_vocabulary, read_tokenizer
from .weights_file import Weights, write_weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

GENERATION_CONFIG_FILE = "generation_config.json"

KEPT_FILES = (CONFIG_FILE, TOKENIZER_CONFIG_FILE, GENERATION_CONFIG_FILE, "special_tokens_map.json", "LICENSE")
"""Copied as they are, where they are there: the way back is then a folder that any other program reads as before."""

ROTARY_BUFFER = "rotary_emb.inv_freq"
"""In files of old; computed from the configuration since."""

SIZES = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 10_000_000,
    "max_position_embeddings": 1 << 31,
}
"""The most that each may be, far above any model there is: a model of a million layers is a mistake, and takes hours to
be found out as one."""

PIECE_ELEMENTS = 1 << 22
"""Numbers looked at at once."""

_TOKEN_SETTINGS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def prepare_folder(source: Path, folder: Path, name: str | None = None) -> ModelCard:
    """Fills the existing, empty `folder` from the Hugging Face folder `source`; `name` is the card's.

    Raises ConfigurationError, saying why, for a model that cannot be trained and published as it is.
    """
    settings = read_table(source / CONFIG_FILE)
    named_architecture(settings.get("model_type"))  # before transformers is asked: it knows hundreds
    _check_sizes(settings, source / CONFIG_FILE)
    config = read_config(source)
    architecture = architecture_of(config)
    tokenizer = read_tokenizer(source / TOKENIZER_FILE)
    with Weights(source) as weights:
        shapes = _check_weights(weights, config)
        for kept in KEPT_FILES:
            if (source / kept).is_file():
                shutil.copyfile(source / kept, folder / kept)
        shutil.copyfile(source / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        card = _card(source, folder, config, architecture.name, tokenizer, name or _name(source))
        write_model_card(folder, card)
        load_vocabulary(folder)
        kept_as = {each: (shape, weights.dtype(each) or torch.float32) for each, shape in shapes.items()}
        wide_first = sorted(kept_as.items(), key=lambda entry: -entry[1][1].itemsize)  # so that all lie aligned
        write_weights(folder / WEIGHTS_FILE, dict(wide_first), partial(_finite, weights))
    return card


def write_folder(model_dir: Path, weights: Mapping[str, torch.Tensor], out: Path, dtype: torch.dtype) -> None:
    """Fills the existing, empty `out` with a Hugging Face folder of these weights of the model in `model_dir`."""
    try:
        card = load_model_card(model_dir)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    settings = read_table(model_dir / CONFIG_FILE)
    shapes = read_shapes(model_dir)
    if weights.keys() != shapes.keys():
        raise ConfigurationError(f"these weights are not of the model in {model_dir}")

    def load(name: str) -> torch.Tensor:
        weight = weights[name]
        if weight.shape != shapes[name]:
            raise ConfigurationError(f"these weights are not of the model in {model_dir}: {name} has another shape")
        return weight

    for kept in (*KEPT_FILES, TOKENIZER_FILE, CHAT_TEMPLATE_FILE):
        if kept != CONFIG_FILE and (model_dir / kept).is_file():
            shutil.copyfile(model_dir / kept, out / kept)
    if not (out / TOKENIZER_CONFIG_FILE).is_file():  # a model that came with the package
        ending = _tokenizer(model_dir / TOKENIZER_FILE).id_to_token(card.stop_ids[0])
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ending}
        (out / TOKENIZER_CONFIG_FILE).write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
    settings.pop("dtype", None)
    settings["torch_dtype"] = str(dtype).removeprefix("torch.")  # the name that every release of transformers reads
    (out / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_weights(out / WEIGHTS_FILE, {name: (shape, dtype) for name, shape in shapes.items()}, load)


def read_config(folder: Path) -> PreTrainedConfig:
    """What the folder's config.json says, as transformers understands it. Raises ConfigurationError."""
    path = folder / CONFIG_FILE
    read_table(path)  # missing, transformers would take the folder for a name on a hub
    with reading(path):
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config


def read_shapes(folder: Path) -> dict[str, torch.Size]:
    """Names and shapes of the parameters of the model in a folder. Raises ConfigurationError."""
    config = read_config(folder)
    with reading(folder / CONFIG_FILE):
        return parameter_shapes(config)


def _check_sizes(settings: Mapping[str, Any], path: Path) -> None:
    """Before anything of these sizes is made. Keys that are missing have the library's defaults."""
    for key, most in SIZES.items():
        value = settings.get(key)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise ConfigurationError(f"{path}: {key} = {_short(value)} is not a whole number from 1 to {most}")
    vocabulary = settings.get("vocab_size") or SIZES["vocab_size"]
    for key in ("bos_token_id", "pad_token_id"):
        value = settings.get(key)
        if value is not None and not (type(value) is int and 0 <= value < vocabulary):
            raise ConfigurationError(f"{path}: {key} = {_short(value)} is not a token id below {vocabulary}, nor null")


def _finite(weights: Weights, name: str) -> torch.Tensor:
    weight = weights.tensor(name)
    if not all(bool(piece.isfinite().all()) for piece in torch.split(weight.flatten(), PIECE_ELEMENTS)):
        raise ConfigurationError(f"{weights.folder}: the weights of {name} are not all finite numbers")
    return weight


def _tokenizer(path: Path) -> Tokenizer:
    with reading(path):
        return Tokenizer.from_file(str(path))


def _check_weights(weights: Weights, config: PreTrainedConfig) -> dict[str, torch.Size]:
    """The parameters and their shapes. Raises ConfigurationError when the files hold other ones."""
    with reading(weights.folder / CONFIG_FILE):
        shapes = parameter_shapes(config)
    names = {name for name in weights.names if not name.endswith(ROTARY_BUFFER)}
    if config.tie_word_embeddings and OUTPUT in names and EMBEDDING in names:
        names.discard(OUTPUT)
        if not torch.equal(weights.tensor(OUTPUT), weights.tensor(EMBEDDING)):
            raise ConfigurationError(
                f"{CONFIG_FILE} says that input and output embeddings are one (tie_word_embeddings), but the weights "
                "hold two different ones; set it to false if the weights are right"
            )
    differences = [
        *(f"{name} is missing" for name in sorted(shapes.keys() - names)),
        *(f"{name} is not part of the model" for name in sorted(names - shapes.keys())),
        *(
            f"{name} has the shape {list(weights.shape(name))} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in names and weights.shape(name) != shape
        ),
        *(f"{name} is neither f32, f16 nor bf16" for name in sorted(names & shapes.keys()) if not weights.dtype(name)),
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ConfigurationError(f"the weights do not fit {CONFIG_FILE}: {'; '.join(differences[:3])}{more}")
    return shapes


def _card(
    source: Path, folder: Path, config: PreTrainedConfig, architecture: str, tokenizer: Mapping[str, Any], name: str
) -> ModelCard:
    ids = {**tokenizer["model"]["vocab"], **{added["content"]: added["id"] for added in tokenizer["added_tokens"]}}
    texts = {index: text for text, index in ids.items()}
    if max(ids.values()) >= config.vocab_size:
        raise ConfigurationError(
            f"{TOKENIZER_FILE} has the token id {max(ids.values())}, {CONFIG_FILE} only {config.vocab_size} of them"
        )
    settings = read_table(source / TOKENIZER_CONFIG_FILE) if (source / TOKENIZER_CONFIG_FILE).is_file() else {}
    stop_ids = _stop_ids(source, config)
    template = read_chat_template(source, settings)
    chat = ChatFormat(_first_marker(source / TOKENIZER_FILE), "")
    if template:
        special = [added["content"] for added in tokenizer["added_tokens"] if added["special"]]
        chat = chat_format(template, _markers(settings), special)
        (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    if chat.end and ids[chat.end] not in stop_ids:
        stop_ids = (ids[chat.end], *stop_ids)
    if not stop_ids:
        raise ConfigurationError(
            f"nothing says which token ends a response: neither eos_token_id in {GENERATION_CONFIG_FILE} or "
            f"{CONFIG_FILE}, nor a chat template"
        )
    unknown = [index for index in stop_ids if index not in texts]
    if unknown:
        raise ConfigurationError(f"a response is to end with token {unknown[0]}, which {TOKENIZER_FILE} does not have")
    if chat.end and chat.end != texts[stop_ids[0]]:  # the first is what GGUF calls end of text and of turn
        stop_ids = (ids[chat.end], *(index for index in stop_ids if index != ids[chat.end]))
    try:
        return ModelCard(
            name=name,
            architecture=architecture,  # type: ignore[arg-type]  # the model checks it
            tokenizer_sha256=tokenizer_sha256(folder),
            vocabulary_size=config.vocab_size,
            context_tokens=min(config.max_position_embeddings, CONTEXT_TOKENS_MAX),
            stop_ids=stop_ids,
            prompt_prefix=chat.prompt_prefix,
            prompt_suffix=chat.prompt_suffix,
            turn_prefix=chat.turn_prefix,
            turn_suffix=chat.turn_suffix,
            special_ids=tuple(sorted(added["id"] for added in tokenizer["added_tokens"] if added["special"])),
        )
    except ValueError as error:
        raise ConfigurationError(
            f"{source} does not make a model card: {' '.join(str(error).split())[:300]}"
        ) from error


def _stop_ids(source: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """What ends a response: generation_config.json's list, which for chat models is longer than config.json's one."""
    path = source / GENERATION_CONFIG_FILE
    ends = read_table(path).get("eos_token_id") if path.is_file() else None
    if ends is None:
        path, ends = source / CONFIG_FILE, config.eos_token_id
    values = ends if isinstance(ends, list) else [] if ends is None else [ends]
    for value in values:
        if type(value) is not int:  # True is 1 for Python
            raise ConfigurationError(f"{path}: eos_token_id = {_short(ends)} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(values))


def _markers(settings: Mapping[str, Any]) -> dict[str, str]:
    """What a template may call by name; an added token is written as a text or as a table with its content."""
    values = {key: settings.get(key) for key in _TOKEN_SETTINGS}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _first_marker(path: Path) -> str:
    """What the tokeniser itself puts before a text (a base model's <bos>); a prompt is encoded without that."""
    tokenizer = _tokenizer(path)
    with reading(path):
        encoding = tokenizer.encode("1", add_special_tokens=True)
    texts: list[str] = []
    for token, special in zip(encoding.tokens, encoding.special_tokens_mask, strict=True):
        if not special:
            break
        texts.append(token)
    return "".join(texts)


def _name(source: Path) -> str:
    """A card's name made of the folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", source.absolute().name).lstrip("._-")[:64] or "model"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
