"""Export of llama-architecture policies to GGUF, the file a node's llama.cpp maps: a snapshot.

Weights come from the live tensors, without a save and load in between. The bytes depend on weights, domain and
tokeniser only (no date, no path), so equal weights give equal snapshot hashes.

Two things go wrong silently if done wrongly, and are therefore tested against llama.cpp itself:
- llama.cpp rotates neighbouring pairs where Hugging Face rotates halves, so the rows of q and k are permuted.
- `tokenizer.ggml.pre` names the pre-tokeniser by a word; the wrong word gives other token ids, not an error.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import gguf
import torch

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.model_card import TOKENIZER_FILE, load_model_card

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from transformers import LlamaConfig, LlamaForCausalLM

Domain = Literal["f32", "f16"]

_TENSOR_TYPES: dict[Domain, tuple[torch.dtype, gguf.LlamaFileType]] = {
    "f32": (torch.float32, gguf.LlamaFileType.ALL_F32),
    "f16": (torch.float16, gguf.LlamaFileType.MOSTLY_F16),
}

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_PRE_TOKENIZERS: tuple[tuple[list[dict[str, Any]], str], ...] = (
    ([_BYTE_LEVEL], "gpt-2"),
    ([{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL], "smollm"),
)
"""What `tokenizer.json` does before BPE, and llama.cpp's word for exactly that. Anything else is refused."""

_INERT_MERGES = ["<none> <none>"]
"""llama.cpp refuses a BPE vocabulary without merges. This one can never apply: BPE starts from single characters."""

_TENSOR_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_TENSOR_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokeniser in llama.cpp's terms. Read once a run: SmolLM2's takes longer to parse than a tiny export."""

    name: str
    context_tokens: int
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    end_id: int


def load_vocabulary(folder: Path) -> GgufVocabulary:
    """The vocabulary of a model folder.

    Raises ConfigurationError when its tokeniser is not one that llama.cpp is known to reproduce.
    """
    try:
        card = load_model_card(folder)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    path = folder / TOKENIZER_FILE
    data = json.loads(path.read_text(encoding="utf-8"))
    model = data["model"]
    pre = _pre_tokenizer_name(data.get("pre_tokenizer"))
    if model["type"] != "BPE" or data.get("normalizer") is not None or model.get("ignore_merges") or pre is None:
        raise ConfigurationError(
            f"{path} is not a tokenizer that can be exported: it must be byte-level BPE, without normalizer, split "
            f"like one of {', '.join(name for _, name in _PRE_TOKENIZERS)}"
        )
    tokens = [f"[PAD{i}]" for i in range(card.vocabulary_size)]
    types = [int(gguf.TokenType.UNUSED)] * card.vocabulary_size
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, int(gguf.TokenType.NORMAL)
    for added in data["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return GgufVocabulary(
        name=card.name,
        context_tokens=card.context_tokens,
        pre=pre,
        tokens=tuple(tokens),
        types=tuple(types),
        merges=tuple(merges or _INERT_MERGES),
        end_id=card.stop_ids[0],
    )


def export_gguf(model: LlamaForCausalLM, vocabulary: GgufVocabulary, path: Path, domain: Domain = "f16") -> Path:
    """Writes the weights as they are now to the new file `path`, durably: it appears under its name only complete.

    Matrices are in `domain`, vectors (norms, biases) in f32, as llama.cpp wants them. Raises FileExistsError when
    `path` exists (a snapshot is immutable), ConfigurationError when llama.cpp would compute something else from it.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists, and a snapshot is never written over")
    partial = path.with_name(f"{path.name}.partial")
    writer = gguf.GGUFWriter(None, "llama")
    _add_metadata(writer, model.config, vocabulary, _TENSOR_TYPES[domain][1])
    for name, array in _tensors(model, _TENSOR_TYPES[domain][0]):
        writer.add_tensor(name, array)
    try:
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
    except BaseException:
        writer.close()
        partial.unlink(missing_ok=True)  # a full disk is not helped by half a snapshot
        raise
    partial.replace(path)
    return path


def gguf_tensor_name(name: str) -> str:
    """The GGUF name of a Hugging Face parameter of the llama architecture. Raises ConfigurationError for any other."""
    if name in _TENSOR_NAMES:
        return _TENSOR_NAMES[name]
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".", 3)
    if parts[:2] == ["model", "layers"] and len(parts) == 4 and parts[3] in _LAYER_TENSOR_NAMES:
        return f"blk.{parts[2]}.{_LAYER_TENSOR_NAMES[parts[3]]}.{kind}"
    raise ConfigurationError(f"the parameter {name} is not of the llama architecture, so it cannot be exported")


def permute_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """q or k rows from Hugging Face's order (first halves, then second halves) to llama.cpp's (pairs), head by head."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def unpermute_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `permute_rows`."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def rotated_heads(name: str, config: LlamaConfig) -> int | None:
    """How many heads a parameter's rows belong to, when they are rotated (and so permuted); None for the others."""
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    if ".k_proj." in name:
        return int(config.num_key_value_heads)
    return None


def _tensors(model: LlamaForCausalLM, dtype: torch.dtype) -> list[tuple[str, NDArray[np.generic]]]:
    """Names and arrays in the order of the layers. Tied output weights are left out: llama.cpp then ties them too."""
    arrays = []
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weight = parameter.detach()
        heads = rotated_heads(name, model.config)
        if heads is not None:
            weight = permute_rows(weight, heads)
        weight = weight.to("cpu", dtype if weight.ndim > 1 else torch.float32)
        arrays.append((gguf_tensor_name(name), weight.contiguous().numpy()))
    return arrays


def _add_metadata(
    writer: gguf.GGUFWriter, config: LlamaConfig, vocabulary: GgufVocabulary, file_type: gguf.LlamaFileType
) -> None:
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or config.hidden_act != "silu":
        raise ConfigurationError(
            f"a model with rope type {rope.get('rope_type')!r} and activation {config.hidden_act!r} cannot be "
            "exported: only the plain llama architecture (default, silu) can"
        )
    if len(vocabulary.tokens) != config.vocab_size:
        raise ConfigurationError(
            f"the tokenizer has {len(vocabulary.tokens)} symbols and the model {config.vocab_size}: not one model"
        )
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_name(vocabulary.name)
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(vocabulary.context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(vocabulary.end_id)
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)
    # Prompts are tokenised by the coordinator, markers included; a second <bos> would be a token nobody sampled.
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _pre_tokenizer_name(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """llama.cpp's word for a `pre_tokenizer` of tokenizer.json; None when it has none that is known to be the same."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    # Offsets of characters only: no effect on ids.
    steps = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    return next((name for known, name in _PRE_TOKENIZERS if known == steps), None)
