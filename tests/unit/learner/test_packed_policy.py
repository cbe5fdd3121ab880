"""The packed path against the plain padded one: the same log-probabilities and the same gradients, in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from echo2.learner import attention
from echo2.learner.logprobs import chunked_logprobs
from echo2.learner.packing import packs
from echo2.learner.policy import enable_checkpointing, packed_logprobs, token_logprobs_and_entropy

torch.set_num_threads(1)

VOCABULARY = 37
TOLERANCE = 1e-5
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
}


def make(name):
    torch.manual_seed(3)
    model = ARCHITECTURES[name]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def models():
    return {name: make(name) for name in ARCHITECTURES}


@st.composite
def batches(draw):
    """Groups of rollouts with prompts, sampled and inserted tokens and temperatures of their own; 0 pads."""
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    rows, masks, group = [], [], []
    for label in range(draw(st.integers(1, 3))):
        prompt = rng.integers(0, VOCABULARY, size=draw(st.integers(1, 6))).tolist()
        for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
            rows.append(prompt + rng.integers(0, VOCABULARY, size=length).tolist())
            masks.append([False] * len(prompt) + (rng.random(length) < 0.8).tolist())
            group.append(label)
    width = max(map(len, rows))
    tokens, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)], mask[index, : len(row)] = row, masks[index]
    temperature = rng.uniform(0.5, 2.0, size=len(rows)).astype(np.float32)
    return tokens, mask, np.array(group), temperature, rng.normal(size=tokens.shape).astype(np.float32)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def packed(model, batch, *, tokens_max, chunk):
    """Log-probabilities and entropy [B, T] and the gradient of their weighted sum, by way of packs."""
    tokens, mask, group, temperature, weight = batch
    logprobs, entropy = torch.zeros(tokens.shape), torch.zeros(tokens.shape)
    for pack in packs(tokens, mask, group, np.arange(len(tokens)), tokens_max=tokens_max):
        at = pack.rows, pack.columns
        targets, heat = torch.from_numpy(tokens[at]), torch.from_numpy(temperature[pack.rows])
        chosen, spread = packed_logprobs(model, pack, targets, heat, chunk=chunk, entropy=True)
        (chosen * torch.from_numpy(weight[at])).sum().backward()
        logprobs[at], entropy[at] = chosen.detach(), spread
    return logprobs, entropy, gradients(model)


def plain(model, batch):
    tokens, mask, _, temperature, weight = (torch.from_numpy(array) for array in batch)
    model.set_attn_implementation("sdpa")
    logprobs, entropy = token_logprobs_and_entropy(model, tokens, mask, temperature)
    if mask.any():
        (logprobs * weight).sum().backward()
    return logprobs.detach(), entropy * mask, gradients(model)


def assert_same(left, right):
    for one, other in zip(left[:2], right[:2], strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)
    assert left[2].keys() == right[2].keys()
    for name, gradient in left[2].items():
        largest = float(right[2][name].abs().max())
        torch.testing.assert_close(gradient, right[2][name], atol=TOLERANCE * max(1.0, largest), rtol=TOLERANCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches(), tokens_max=st.integers(1, 60), chunk=st.integers(1, 30))
def test_packing_changes_no_number(models, name, batch, tokens_max, chunk):
    """Whatever the lengths, the budget and the chunk: log-probabilities, entropy and every gradient agree to 1e-5."""
    expected = plain(models[name], batch)
    assert_same(packed(models[name], batch, tokens_max=tokens_max, chunk=chunk), expected)


def fixed_batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, size=(4, 20))
    tokens[:, :6] = tokens[0, :6]
    mask = np.zeros(tokens.shape, bool)
    mask[:, 6:] = True
    weight = rng.normal(size=tokens.shape).astype(np.float32)
    return tokens, mask, np.zeros(4, np.int64), np.ones(4, np.float32), weight


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_long_keys_take_the_blocked_kernel(models, name, monkeypatch):
    """Above the bound torch's own kernel computes the attention, to the same numbers."""
    monkeypatch.setattr(attention, "PLAIN_KEYS_MAX", 4)
    batch = fixed_batch()
    expected = plain(models[name], batch)
    assert_same(packed(models[name], batch, tokens_max=1000, chunk=7), expected)


def test_gradient_checkpointing_changes_no_number(models):
    """Activations computed twice are the same activations."""
    batch = fixed_batch()
    expected = packed(models["llama"], batch, tokens_max=1000, chunk=16)
    model = make("llama")
    enable_checkpointing(model)
    passes = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: passes.append(1))
    assert_same(packed(model, batch, tokens_max=1000, chunk=16), expected)
    assert len(passes) == 2


def test_a_sliding_window_reaches_over_the_stem():
    """A branch sees only as much of its stem as the window leaves, as the plain path does."""
    torch.manual_seed(3)
    config = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    model = Qwen2ForCausalLM(config).eval()
    assert config.layer_types == ["full_attention", "sliding_attention"]
    batch = fixed_batch()
    expected = plain(model, batch)
    assert_same(packed(model, batch, tokens_max=1000, chunk=16), expected)


def test_an_architecture_with_an_attention_of_its_own_is_run_all_the_same():
    """GPT-2 takes its attention from transformers too: nothing here knows one architecture from another."""
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    batch = fixed_batch()
    tokens, mask = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
    logits = model(tokens).logits.log_softmax(dim=-1)
    expected = logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0][mask[:, 1:]]
    logprobs = packed(model, batch, tokens_max=1000, chunk=16)[0][mask]
    torch.testing.assert_close(logprobs, expected.detach(), atol=TOLERANCE, rtol=TOLERANCE)


def test_chunks_of_logits_change_no_number():
    """One at a time or all at once: log-probability, entropy and both gradients are those of log-softmax."""
    torch.manual_seed(0)
    hidden = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    targets, temperature = torch.randint(0, 7, (11,)), torch.rand(11) + 0.5
    factor = torch.randn(11)
    reference = (hidden @ weight.T / temperature[:, None]).log_softmax(dim=-1)
    expected = reference.gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((expected * factor).sum(), [hidden, weight])
    for chunk in (1, 4, 100):
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature, chunk=chunk, entropy=True)
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            entropy.double(), -(reference.exp() * reference).sum(dim=-1).detach(), atol=1e-5, rtol=1e-5
        )
        for ours, theirs in zip(torch.autograd.grad((logprobs * factor).sum(), [hidden, weight]), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_logits_too_large_to_exponentiate():
    """The largest logit is taken out first, so that logits of a thousand overflow nowhere."""
    hidden, weight = torch.tensor([[1000.0]], requires_grad=True), torch.tensor([[1.0], [0.9]])
    logprobs, _ = chunked_logprobs(hidden, weight, torch.tensor([1]), torch.ones(1), chunk=1)
    assert logprobs.item() == pytest.approx(-100.0)
    logprobs.sum().backward()
    assert hidden.grad.item() == pytest.approx(-0.1, rel=1e-4)
