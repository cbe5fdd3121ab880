"""`[train]` settings that trade speed or memory: bf16 products and gradient checkpointing, on the tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trio

from echo2.learner.config import LearnerConfig
from echo2.learner.interfaces import Batch, Group
from echo2.learner.tiny import prepare_tiny
from echo2.learner.trainer import TorchTrainer
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.messages import AdmittedRollout

PEER = Identity(b"p" * 32).peer_id
needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bf16 instructions"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    prepare_tiny(folder)
    return folder


@pytest.fixture
def make(model_dir, tmp_path):
    def make(**train):
        address = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
        return TorchTrainer(
            LearnerConfig(home=tmp_path, model_dir=model_dir, run="demo", coordinator=address, train=train)
        )

    return make


def batch():
    rng = np.random.default_rng(0)
    groups = []
    for ordinal in range(4):
        prompt = [*rng.integers(3, 13, size=2).tolist(), 13, int(rng.integers(3, 13)), 14]
        rollouts = []
        for sample in range(4):
            response = [*rng.integers(3, 13, size=int(rng.integers(1, 3))).tolist(), 2]
            rollouts.append(
                AdmittedRollout(
                    sequence=1,
                    lease_id=bytes([ordinal, sample]) * 8,
                    ordinal=ordinal,
                    sample=sample,
                    peer=PEER,
                    version=0,
                    prompt_tokens=pack_tokens(prompt),
                    tokens=pack_tokens(response),
                    logprobs=pack_logprobs([-1.0] * len(response)),
                    finish="stop",
                    temperature=1.0,
                    reward=float(sample % 2),
                )
            )
        groups.append(Group(ordinal, tuple(rollouts)))
    return Batch(0, tuple(groups))


@needs_bf16
def test_bf16_products_are_near_and_weights_stay_float32(make):
    """Loss, gradient and entropy within two percent of f32, from float32 weights."""
    exact, fast = make(), make(dtype="bf16")
    expected, stats = exact.train_now(batch()), fast.train_now(batch())
    assert stats.updates == expected.updates == 2
    assert stats.gradient_norm == pytest.approx(expected.gradient_norm, rel=0.02)
    assert stats.entropy == pytest.approx(expected.entropy, rel=0.02)
    assert stats.gradient_norm != expected.gradient_norm
    assert {parameter.dtype for parameter in fast.model.parameters()} == {torch.float32}


@needs_bf16
def test_the_format_of_products_is_put_back(make):
    """However a step ends, what else multiplies matrices in this process does so as before."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision

    def stop():
        assert matmul.fp32_precision == "bf16"
        raise trio.TooSlowError

    with pytest.raises(trio.TooSlowError):
        make(dtype="bf16").train_now(batch(), stop)
    assert matmul.fp32_precision == before


def test_bf16_on_a_processor_without_it_is_refused(make, monkeypatch):
    """Before the run, in one line that says what to set."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ConfigurationError, match='set it to "f32"'):
        make(dtype="bf16")


def test_gradient_checkpointing_makes_the_same_step(make):
    """The setting costs time and nothing else."""
    expected, stats = make().train_now(batch()), make(gradient_checkpointing=True).train_now(batch())
    assert stats.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
    assert stats.loss == pytest.approx(expected.loss, abs=1e-6)
