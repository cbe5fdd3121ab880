"""The architectures a run may have, in Hugging Face's terms and in llama.cpp's: llama, qwen2, qwen3.

What llama.cpp would compute otherwise is refused here, with the reason, before anything is trained or published.

Two things go wrong silently if done wrongly, and are therefore tested against llama.cpp itself:
- For llama (not for qwen) llama.cpp rotates neighbouring pairs where Hugging Face rotates halves, so the rows of q and
  k are permuted.
- A llama3-scaled rope is a vector of divisors in the file; llama.cpp knows nothing of the four numbers it is made from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"

_TENSOR_NAMES = {
    EMBEDDING: "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    OUTPUT: "output.weight",
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
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}

_ROPES = ("default", "linear", "llama3")
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
)

NORM_EPSILON_MAX = 0.1
"""Models have 1e-6 to 1e-5; this much already drowns what is normalised."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. `name` is both `model_type` in config.json and `general.architecture` in GGUF.

    `permuted`: rows of q and k change their order on the way to GGUF. `layer_names`: GGUF's for each part of a layer.
    """

    name: str
    model: type[PreTrainedModel]
    permuted: bool
    layer_names: Mapping[str, str]


ARCHITECTURES = {
    known.name: known
    for known in (
        Architecture("llama", LlamaForCausalLM, permuted=True, layer_names=_LAYER_TENSOR_NAMES),
        Architecture("qwen2", Qwen2ForCausalLM, permuted=False, layer_names=_LAYER_TENSOR_NAMES),
        Architecture("qwen3", Qwen3ForCausalLM, permuted=False, layer_names={**_LAYER_TENSOR_NAMES, **_HEAD_NORMS}),
    )
}


def named_architecture(name: object) -> Architecture:
    """The architecture of this name. Raises ConfigurationError when it is not one of ours."""
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise ConfigurationError(
            f"models of the architecture {name!r} are not supported, only {', '.join(ARCHITECTURES)}"
        )
    return known


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """The architecture of a configuration. Raises ConfigurationError when llama.cpp would compute something else."""
    known = named_architecture(config.model_type)
    rope = rope_of(config)
    _check_numbers(config, rope)
    kind = rope.get("rope_type", "default")
    reasons = [
        (kind not in _ROPES, f"its rope is of the type {kind!r}, and only {', '.join(_ROPES)} are exported exactly"),
        (float(rope.get("partial_rotary_factor", 1.0)) != 1.0, "its rope turns a part of each head only"),
        (config.hidden_act != "silu", f"its activation is {config.hidden_act!r}, not 'silu'"),
        (
            bool(getattr(config, "use_sliding_window", False))
            or any(layer != "full_attention" for layer in getattr(config, "layer_types", None) or ()),
            "its attention has a sliding window",
        ),
        (
            known.name == "qwen3" and bool(getattr(config, "attention_bias", False)),
            "its attention has biases, which llama.cpp has no place for in qwen3",
        ),
        (head_dim(config) % 2 == 1, "its heads have an odd width"),
        (getattr(config, "quantization_config", None) is not None, "its weights are quantised; take the original"),
    ]
    for applies, reason in reasons:
        if applies:
            raise ConfigurationError(f"this {known.name} model cannot be exported to llama.cpp: {reason}")
    return known


def _check_numbers(config: PreTrainedConfig, rope: Mapping[str, Any]) -> None:
    """Refuse numbers with which a model computes NaN, or nothing but its own bias, from its very first token."""
    for key, value, below in (
        ("rms_norm_eps", getattr(config, "rms_norm_eps", None), NORM_EPSILON_MAX),
        *((key, rope[key], math.inf) for key in _ROPE_NUMBERS if key in rope),
    ):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < below:
            bounds = "above 0" + (f" and below {below:g}" if below < math.inf else "")
            raise ConfigurationError(f"{key} = {str(value)[:32]!r} in config.json is not a number {bounds}")


def rope_of(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The parameters of the rotary embedding, `rope_theta` among them."""
    return dict(config.rope_parameters or {})


def head_dim(config: PreTrainedConfig) -> int:
    """Columns of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def parameter_shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Each parameter's name and shape, in the model's own order; tied output weights are not among them."""
    with torch.device("meta"):
        model = architecture_of(config).model(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def gguf_tensor_name(name: str, architecture: Architecture = ARCHITECTURES["llama"]) -> str:
    """The GGUF name of a Hugging Face parameter. Raises ConfigurationError when the architecture has no such one."""
    if name in _TENSOR_NAMES:
        return _TENSOR_NAMES[name]
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".", 3)
    if parts[:2] == ["model", "layers"] and len(parts) == 4 and parts[3] in architecture.layer_names:
        return f"blk.{parts[2]}.{architecture.layer_names[parts[3]]}.{kind}"
    raise ConfigurationError(
        f"the parameter {name} is not of the {architecture.name} architecture, so it cannot be exported"
    )


def permute_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """q or k rows from Hugging Face's order (first halves, then second halves) to llama.cpp's (pairs), head by head."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def unpermute_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `permute_rows`."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def rotated_heads(name: str, config: PreTrainedConfig) -> int | None:
    """How many heads a parameter's rows belong to, when they are permuted; None for the others."""
    if not named_architecture(config.model_type).permuted:
        return None
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    if ".k_proj." in name:
        return int(config.num_key_value_heads)
    return None


def rope_factors(config: PreTrainedConfig) -> torch.Tensor | None:
    """What llama.cpp divides each pair's frequency by, float32 [head_dim / 2]; None when nothing is divided.

    With wavelength w = 2 pi theta^(2i/d), context L, factor f, bounds a = low_freq_factor and b = high_freq_factor:
    1 where w < L/b, f where w > L/a, and between them 1 / ((1 - s) / f + s) with s = (L/w - a) / (b - a).
    """
    rope = rope_of(config)
    if rope.get("rope_type", "default") != "llama3":
        return None
    width, factor = head_dim(config), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context = float(rope["original_max_position_embeddings"])
    factors = []
    for pair in range(width // 2):
        wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (2 * pair / width)
        smooth = (context / wavelength - low) / (high - low)
        factors.append(
            1.0
            if wavelength < context / high
            else factor
            if wavelength > context / low
            else 1 / ((1 - smooth) / factor + smooth)
        )
    return torch.tensor(factors, dtype=torch.float32)


def add_hyperparameters(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """What llama.cpp needs to know of the model, but for its context and its vocabulary."""
    rope = rope_of(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
