"""One training step on packs: nothing is evaluated twice, nothing that teaches nothing goes backward, same weights."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
import trio
from transformers import LlamaConfig, LlamaForCausalLM

from echo2.learner import step as step_module
from echo2.learner.batch import BatchArrays
from echo2.learner.config import TrainSettings
from echo2.learner.loss import Objective, grpo_loss, importance_weights, token_scales
from echo2.learner.policy import token_logprobs
from echo2.learner.step import Learner, TrainingStep

torch.set_num_threads(1)

VOCABULARY = 23
GROUPS, SIZE = 4, 3


def small_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def make_arrays(advantages=None, seed=0):
    rng = np.random.default_rng(seed)
    tokens = np.zeros((GROUPS * SIZE, 16), np.int64)
    mask = np.zeros(tokens.shape, bool)
    for group in range(GROUPS):
        prompt = rng.integers(0, VOCABULARY, size=rng.integers(2, 7))
        for sample in range(SIZE):
            row, length = group * SIZE + sample, int(rng.integers(2, 10))
            tokens[row, : len(prompt)] = prompt
            tokens[row, len(prompt) : len(prompt) + length] = rng.integers(0, VOCABULARY, size=length)
            mask[row, len(prompt) : len(prompt) + length] = True
    if advantages is None:
        advantages = rng.normal(size=len(tokens))
    return BatchArrays(
        tokens=tokens,
        mask=mask,
        sampler_logprobs=np.where(mask, -np.log(VOCABULARY) + rng.normal(size=mask.shape), 0).astype(np.float32),
        advantages=np.asarray(advantages, np.float32),
        temperature=np.full(len(tokens), 0.9, np.float32),
        group=np.repeat(np.arange(GROUPS), SIZE),
        nodes=("n",) * len(tokens),
        keys=tuple((b"l", row) for row in range(len(tokens))),
        groups_without_spread=0,
    )


def make_learner(*, reference=None, objective=None, **changes):
    model = small_model()
    settings = TrainSettings(learning_rate=1e-2, micro_tokens=30, logprob_chunk_tokens=5, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    return Learner(model, optimizer, reference, objective or Objective(), settings)


MINIBATCHES = [np.arange(6), np.arange(6, 12)]


def plain_step(learner, arrays):
    """DESIGN section 10 as it is written: padded rows, pi_learner,old for the whole batch first, then the updates."""
    tokens, mask = torch.from_numpy(arrays.tokens), torch.from_numpy(arrays.mask)
    temperature, advantages = torch.from_numpy(arrays.temperature), torch.from_numpy(arrays.advantages)
    with torch.no_grad():
        old = token_logprobs(learner.model, tokens, mask, temperature)
        reference = None if learner.reference is None else token_logprobs(learner.reference, tokens, mask, temperature)
    weights = importance_weights(old, torch.from_numpy(arrays.sampler_logprobs), learner.objective.ratio_cap)
    losses = []
    for rows in MINIBATCHES:
        own = mask[rows]
        logprobs = token_logprobs(learner.model, tokens[rows], own, temperature[rows])[own]
        scales = token_scales(own.sum(dim=1), learner.objective)[:, None].expand(own.shape)[own]
        parts = grpo_loss(
            logprobs,
            old[rows][own],
            weights[rows][own],
            advantages[rows, None].expand(own.shape)[own],
            learner.objective,
            None if reference is None else reference[rows][own],
            scales,
        )
        learner.optimizer.zero_grad()
        parts.loss_sum.backward()
        torch.nn.utils.clip_grad_norm_(learner.model.parameters(), learner.settings.gradient_clip)
        learner.optimizer.step()
        losses.append(float(parts.loss_sum.detach()))
    return old, losses


def run(learner, arrays, minibatches=MINIBATCHES):
    step = TrainingStep(learner, arrays, lambda: None)
    return step, step.run(minibatches)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_a_step_is_the_plain_one(kl_weight, aggregation):
    """Packed, chunked and with the first forward pass reused: the weights, losses and pi_old of the step as written."""
    objective = Objective(kl_weight=kl_weight, aggregation=aggregation)
    reference = small_model(seed=7) if kl_weight else None
    fast = make_learner(reference=reference, objective=objective)
    slow = make_learner(reference=copy.deepcopy(reference), objective=objective)
    arrays = make_arrays()
    step, updates = run(fast, arrays)
    old, losses = plain_step(slow, arrays)
    torch.testing.assert_close(step.old, old, atol=1e-5, rtol=1e-5)
    assert [update.loss for update in updates] == pytest.approx(losses, abs=1e-5)
    for (name, ours), theirs in zip(fast.model.named_parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0, msg=name)  # AdamW divides by tiny gradients


@pytest.fixture
def evaluations(monkeypatch):
    """(rows, with gradient) of each evaluation of the policy."""
    seen = []
    real = step_module.packed_logprobs

    def counted(model, pack, *arguments, **options):
        seen.append((sorted(set(pack.rows.tolist())), torch.is_grad_enabled()))
        return real(model, pack, *arguments, **options)

    monkeypatch.setattr(step_module, "packed_logprobs", counted)
    return seen


def rows_of(evaluations, *, gradient):
    return sorted(row for rows, with_gradient in evaluations if with_gradient is gradient for row in rows)


def test_the_first_minibatch_is_evaluated_once(evaluations):
    """Its update's own forward pass is pi_learner,old; only the rows of later updates are evaluated before."""
    run(make_learner(), make_arrays())
    assert rows_of(evaluations, gradient=False) == list(range(6, 12))
    assert rows_of(evaluations, gradient=True) == list(range(12))


def test_rollouts_that_teach_nothing_are_only_measured(evaluations):
    """An advantage of 0 has no gradient: no backward pass for it, and pi_learner,old and entropy as for any other."""
    advantages = np.ones(GROUPS * SIZE)
    advantages[[0, 1, 2, 9, 10, 11]] = 0
    step, updates = run(make_learner(), make_arrays(advantages))
    assert rows_of(evaluations, gradient=True) == [3, 4, 5, 6, 7, 8]
    assert rows_of(evaluations, gradient=False) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    arrays = make_arrays(advantages)
    slow = make_learner()
    old, losses = plain_step(slow, arrays)
    torch.testing.assert_close(step.old, old, atol=1e-5, rtol=1e-5)
    assert (step.entropy[torch.from_numpy(arrays.mask)] > 0).all()
    assert [update.loss for update in updates] == pytest.approx(losses, abs=1e-5)


def test_a_kl_term_pulls_at_every_rollout(evaluations):
    """With one, an advantage of 0 is no reason to leave a rollout out."""
    learner = make_learner(reference=small_model(seed=7), objective=Objective(kl_weight=0.1))
    run(learner, make_arrays(np.zeros(GROUPS * SIZE)))
    assert rows_of(evaluations, gradient=True) == list(range(12))


def test_a_first_update_that_is_stopped_is_measured_to_its_end():
    """What comes after the culprit has its pi_learner,old all the same, from the untouched weights."""
    arrays = make_arrays()
    arrays.advantages[0] = np.inf
    learner = make_learner()
    before = copy.deepcopy(learner.model)
    step, updates = run(learner, arrays, [np.arange(12)])
    assert updates[0].fault is not None
    assert [row for row, _ in updates[0].culprits] == [0]
    with torch.no_grad():
        tokens, mask = torch.from_numpy(arrays.tokens), torch.from_numpy(arrays.mask)
        expected = token_logprobs(before, tokens, mask, torch.from_numpy(arrays.temperature))
    torch.testing.assert_close(step.old, expected, atol=1e-5, rtol=1e-5)


async def test_the_loop_goes_on_while_a_step_computes():
    """In a worker thread, a step gives the loop its turns: work handed to the loop from within the step gets done."""
    learner, arrays = make_learner(), make_arrays()
    done = []
    loop = threading.get_ident()

    def breathe():
        trio.from_thread.run_sync(lambda: done.append(threading.get_ident() == loop))

    await trio.to_thread.run_sync(lambda: TrainingStep(learner, arrays, breathe).run(MINIBATCHES))
    assert len(done) > 2
    assert all(done)
