"""llama.cpp as the judge of what was exported: its token ids and its log-probabilities, as exact as it can be."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_cpp import llama_cpp as llama
from numpy.typing import NDArray

F32, F16 = 0, 1  # ggml types


@llama.llama_log_callback
def silence(*_: Any) -> None:
    pass


@contextlib.contextmanager
def llama_model(path: Path) -> Iterator[Any]:
    """The model in a GGUF file. Without llama.cpp's special kernels, which some virtual machines do not allow."""
    llama.llama_log_set(silence, ctypes.c_void_p(0))
    llama.llama_backend_init()
    parameters = llama.llama_model_default_params()
    parameters.use_extra_bufts = False
    model = llama.llama_model_load_from_file(str(path).encode(), parameters)
    assert model, f"llama.cpp cannot load {path}"
    try:
        yield model
    finally:
        llama.llama_model_free(model)


def llama_logprobs(
    model: Any, tokens: Sequence[int], cache_type: int = F32, adapter: Path | None = None
) -> NDArray[np.float64]:
    """log softmax of every position's logits, the whole row decoded at once by one thread.

    Without flash attention, which computes in f16 whatever the cache is (2e-3 on log-probabilities by itself).
    """
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_seq_max = 256, 256, 1
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.type_k = parameters.type_v = cache_type
    parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, parameters)
    lora = None
    if adapter is not None:
        lora = llama.llama_adapter_lora_init(model, str(adapter).encode())
        assert lora, f"llama.cpp cannot load {adapter}"
        adapters = (llama.llama_adapter_lora_p_ctypes * 1)(lora)
        assert llama.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    try:
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, True
        assert llama.llama_decode(context, batch) == 0
        logits = np.stack(
            [
                np.ctypeslib.as_array(llama.llama_get_logits_ith(context, place), (vocabulary,)).astype(np.float64)
                for place in range(len(tokens))
            ]
        )
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        if lora is not None:
            llama.llama_adapter_lora_free(lora)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def llama_tokens(model: Any, text: str) -> list[int]:
    """Special tokens are known by their text, nothing is put before or after."""
    data = text.encode()
    buffer = (llama.llama_token * (len(data) + 8))()
    vocabulary = llama.llama_model_get_vocab(model)
    count = llama.llama_tokenize(vocabulary, data, len(data), buffer, len(buffer), False, True)
    assert count >= 0
    return list(buffer[:count])


@torch.no_grad()
def torch_logprobs(model: Any, tokens: Sequence[int]) -> NDArray[np.float64]:
    """The same numbers from torch."""
    logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1).numpy()
