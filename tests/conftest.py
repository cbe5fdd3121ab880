"""Fixtures that several kinds of test share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

VOCABULARY = 15


def write_random_gguf(path: Path, *, seed: int, context_tokens: int = 64) -> Path:
    """A llama model of random weights, small enough to make in milliseconds."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    width, layers, heads, inner = 32, 2, 2, 64

    def weights(*shape, scale=0.2):
        return rng.normal(0, scale, shape).astype(np.float32)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(0)
    writer.add_tokenizer_model("no_vocab")
    writer.add_tensor("token_embd.weight", weights(VOCABULARY, width, scale=1.0))
    for layer in range(layers):
        for name, shape in {
            **{f"attn_{n}": (width, width) for n in ("q", "k", "v", "output")},
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", weights(*shape))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.add_tensor("output.weight", weights(VOCABULARY, width))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sha256_of(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


@pytest.fixture(scope="session")
def random_ggufs(tmp_path_factory) -> list[tuple[Path, bytes]]:
    """Two different tiny models: (path, SHA-256) each."""
    folder = tmp_path_factory.mktemp("gguf")
    paths = [write_random_gguf(folder / f"random-{seed}.gguf", seed=seed) for seed in (1, 2)]
    return [(path, sha256_of(path)) for path in paths]
