"""What the learner exports, on the engine that nodes run: every architecture, in the formats it is published in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp")

from contract.small_models import write_folder

from echo2.learner.adapter import add_adapter, export_adapter
from echo2.learner.config import AdapterSettings
from echo2.learner.gguf_export import export_gguf
from echo2.learner.policy import load_policy, token_logprobs
from echo2.learner.prepare import prepare_from
from echo2.learner.vocabulary import load_vocabulary
from echo2.node.engine import EngineOptions, SliceOrder
from echo2.node.llama_engine import LlamaEngine
from echo2.p2p.codec import pack_tokens, unpack_logprobs, unpack_tokens
from echo2.p2p.messages import Sampling

torch.set_num_threads(1)

PROMPT = [300, 17, 450, 620, 77, 301]

KL_MAX = {"f32": 1e-3, "f16": 1e-3, "bf16": 1e-3, "q8_0": 5e-3}
"""Nats a token (DESIGN section 10: noise of the number format). The engine's cache is f16 in any case."""


@pytest.fixture
def engine():
    engine = LlamaEngine(EngineOptions(plain_kernels=True))
    yield engine
    engine.close()


def divergence(engine: LlamaEngine, policy) -> float:
    """k3-KL of the sampler to the learner on the sampled tokens, as the learner measures it at staleness 0."""
    sampling = Sampling(temperature=0.8, tokens_max=24, stop_ids=(2,))
    (result,) = engine.generate([SliceOrder(b"s" * 32, 0, 16, pack_tokens(PROMPT), sampling)])
    found = []
    for rollout in result.rollouts:
        response = unpack_tokens(rollout.tokens).tolist()
        tokens = torch.tensor([PROMPT + response])
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[0, len(PROMPT) :] = True
        with torch.no_grad():
            ours = token_logprobs(policy, tokens, mask, 0.8)[0, len(PROMPT) :].double().numpy()
        ratio = ours - unpack_logprobs(rollout.logprobs)
        found.append(np.exp(ratio) - 1 - ratio)
    return float(np.concatenate(found).mean())


@pytest.mark.parametrize("name", ["llama", "llama-3", "qwen2", "qwen3"])
def test_sampler_and_learner_agree_in_every_format(engine, tmp_path, name):
    """At staleness 0 the KL is the noise of the number format; with an adapter on the snapshot it is so again."""
    write_folder(tmp_path / "hub", name)
    prepare_from(tmp_path / "hub", tmp_path / "model")
    policy, _ = load_policy(tmp_path / "model")
    adapted, _ = load_policy(tmp_path / "model")
    add_adapter(adapted, AdapterSettings(rank=4, alpha=8.0), seed=1)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if ".lora_B." in key:
                parameter.normal_(std=0.15, generator=torch.Generator().manual_seed(len(key)))
    weights = {key: p.detach() for key, p in adapted.named_parameters() if p.requires_grad}
    for domain, bound in KL_MAX.items():
        path = export_gguf(policy, load_vocabulary(tmp_path / "model"), tmp_path / f"{domain}.gguf", domain)
        engine.load(path)
        assert divergence(engine, policy) < bound, domain
        engine.adapt(export_adapter(policy.config, weights, 8.0, tmp_path / f"{domain}-adapter.gguf", domain))
        assert divergence(engine, adapted) < bound, domain
        assert divergence(engine, policy) > 3 * bound, "the adapter does nothing"


def test_the_cache_is_sized_by_the_width_of_the_heads(engine, tmp_path):
    """Qwen3's heads are wider than the model's width divided among them: the owner's bound holds all the same."""
    write_folder(tmp_path / "hub", "qwen3")
    prepare_from(tmp_path / "hub", tmp_path / "model")
    policy, _ = load_policy(tmp_path / "model")
    engine.load(export_gguf(policy, load_vocabulary(tmp_path / "model"), tmp_path / "x.gguf", "f16"))
    layers, kv_heads, width, keys_and_values, float16 = 3, 2, 32, 2, 2
    assert engine._cell_bytes() == layers * kv_heads * width * keys_and_values * float16
