"""Export of policies to GGUF, the file a node's llama.cpp maps: a snapshot.

The bytes depend on weights, domain, tokeniser and chat template only (no date, no path), so equal weights give equal
snapshot hashes. Tensors are read, converted and written a few rows at a time: beside the weights themselves, which may
lie in a mapped file, an export needs some tens of megabytes, whatever the model's size.

Names and order of rows are `architectures`' business, tokens `vocabulary`'s, number formats `quantise`'s.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch

from echo2.p2p.errors import ConfigurationError

from .architectures import (
    ROPE_FACTORS,
    add_hyperparameters,
    architecture_of,
    gguf_tensor_name,
    parameter_shapes,
    permute_rows,
    rope_factors,
    rotated_heads,
)
from .quantise import FILE_TYPES, Encoding, encoded, encoding_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from transformers import PreTrainedConfig, PreTrainedModel

    from .quantise import Domain
    from .vocabulary import GgufVocabulary


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on its way into a file: `load` gives it when its turn has come.

    `permuted_heads` says that its rows change their order, head by head.
    """

    name: str
    shape: torch.Size
    encoding: Encoding
    load: Callable[[], torch.Tensor]
    permuted_heads: int | None = None


def export_gguf(model: PreTrainedModel, vocabulary: GgufVocabulary, path: Path, domain: Domain = "f16") -> Path:
    """As `export_weights`, of a model's live weights."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return export_weights(model.config, weights, vocabulary, path, domain)


def export_weights(
    config: PreTrainedConfig,
    weights: Mapping[str, torch.Tensor],
    vocabulary: GgufVocabulary,
    path: Path,
    domain: Domain = "f16",
) -> Path:
    """Writes these weights to the new file `path`, durably: it appears under its name only complete.

    `weights` are the model's parameters by their Hugging Face names, tied ones once; each is asked for once, when it is
    written. Matrices are stored in `domain`, vectors (norms, biases) in f32. Raises FileExistsError when `path` exists
    (a snapshot is immutable), and ConfigurationError when llama.cpp would compute something else from it, when the
    weights are not this model's, or when the domain cannot hold one of them.
    """
    architecture = architecture_of(config)
    if len(vocabulary.tokens) != config.vocab_size:
        raise ConfigurationError(
            f"the tokenizer has {len(vocabulary.tokens)} symbols and the model {config.vocab_size}: not one model"
        )
    shapes = parameter_shapes(config)
    if weights.keys() != shapes.keys():
        raise ConfigurationError("the weights are not those of a model of this configuration")
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_name(vocabulary.name)
    writer.add_file_type(FILE_TYPES[domain])
    if domain == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(vocabulary.context_tokens)
    add_hyperparameters(writer, config)
    _add_vocabulary(writer, config, vocabulary)
    factors = rope_factors(config)
    tensors = []
    if factors is not None:
        tensors.append(
            StoredTensor(ROPE_FACTORS, factors.shape, encoding_of(factors.shape, domain), partial(torch.clone, factors))
        )
    for name, shape in shapes.items():
        stored = gguf_tensor_name(name, architecture)
        load = partial(weights.__getitem__, name)
        tensors.append(StoredTensor(stored, shape, encoding_of(shape, domain), load, rotated_heads(name, config)))
    return write_gguf(writer, tensors, path)


def write_gguf(writer: gguf.GGUFWriter, tensors: Sequence[StoredTensor], path: Path) -> Path:
    """Metadata of `writer`, then the tensors, into the new file `path`: whole and durable, or not there at all.

    Raises FileExistsError, OSError, and ConfigurationError for a number its encoding cannot hold.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists, and a snapshot is never written over")
    unfinished = path.with_name(f"{path.name}.partial")
    for tensor in tensors:
        encoding = tensor.encoding
        writer.add_tensor_info(
            tensor.name, list(tensor.shape), np.dtype(np.float32), encoding.length_bytes, raw_dtype=encoding.kind
        )
    try:
        try:
            writer.write_header_to_file(unfinished)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        with unfinished.open("ab") as file:
            for tensor in tensors:
                _pad(file)
                for piece in _pieces(tensor):
                    file.write(piece)
            _pad(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)  # a full disk is not helped by half a snapshot
        raise
    unfinished.replace(path)
    return path


def _pieces(tensor: StoredTensor) -> Iterator[memoryview]:
    weight = tensor.load()
    if weight.shape != tensor.shape:
        raise ConfigurationError(
            f"{tensor.name} is {list(weight.shape)} instead of {list(tensor.shape)}: these are another model's weights"
        )
    if tensor.permuted_heads is not None:
        weight = permute_rows(weight, tensor.permuted_heads)
    try:
        yield from encoded(weight, tensor.encoding)
    except ValueError as error:
        raise ConfigurationError(f"the tensor {tensor.name} cannot be exported: {error}") from error


def _pad(file: BinaryIO) -> None:
    """Zeros up to the next multiple of GGUF's alignment."""
    file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _add_vocabulary(writer: gguf.GGUFWriter, config: PreTrainedConfig, vocabulary: GgufVocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(vocabulary.end_id)
    writer.add_eot_token_id(vocabulary.end_id)
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)
    # Prompts are tokenised by the coordinator, markers included; a second <bos> would be a token nobody sampled.
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)
