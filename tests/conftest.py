"""Fixtures that several kinds of test share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from postgresql import Server, programs

settings.register_profile("echo2", deadline=None)  # a machine with other work on it is no defect
settings.load_profile("echo2")

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


def write_random_adapter(path: Path, *, seed: int, width: int = 32) -> Path:
    """A LoRA adapter for the models above, strong enough that nothing is generated as before."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for layer in range(2):
        for name in ("attn_v", "attn_output"):
            stem = f"blk.{layer}.{name}.weight"
            writer.add_tensor(f"{stem}.lora_a", rng.normal(0, 1, (4, width)).astype(np.float32))
            writer.add_tensor(f"{stem}.lora_b", rng.normal(0, 1, (width, 4)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sha256_of(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


@pytest.fixture(scope="session")
def postgresql():
    """A PostgreSQL server of the tests' own."""
    found = programs()
    if found is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="no driver here: pip install 'psycopg[binary]'")
    server = Server(found)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """An empty database, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    return request.getfixturevalue("postgresql").emptied()


@pytest.fixture(scope="session")
def random_ggufs(tmp_path_factory) -> list[tuple[Path, bytes]]:
    """Two different tiny models: (path, SHA-256) each."""
    folder = tmp_path_factory.mktemp("gguf")
    paths = [write_random_gguf(folder / f"random-{seed}.gguf", seed=seed) for seed in (1, 2)]
    return [(path, sha256_of(path)) for path in paths]


@pytest.fixture(scope="session")
def random_adapters(tmp_path_factory) -> list[tuple[Path, bytes]]:
    """Two different adapters for the tiny models, and one that fits neither: (path, SHA-256) each."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [write_random_adapter(folder / f"adapter-{seed}.gguf", seed=seed) for seed in (1, 2)]
    paths.append(write_random_adapter(folder / "wide.gguf", seed=3, width=64))
    return [(path, sha256_of(path)) for path in paths]
