"""Our objective beside TRL's own, number for number, on the same model and batch, wherever TRL has the option.

TRL's trainer is built but never run: its generation is replaced by the batch's tokens and log-probabilities, and what
it makes of them (advantages, ratio to the sampler, loss) is compared. It is a dependency of the benchmarks only.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from echo2.learner.advantage import EPSILON
from echo2.learner.batch import collate
from echo2.learner.interfaces import Batch, Group
from echo2.learner.loss import Objective, grpo_loss, importance_weights, token_scales
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.messages import AdmittedRollout

trl = pytest.importorskip("trl", reason="trl, a dependency of the benchmarks only, is not installed")
datasets = pytest.importorskip("datasets", reason="datasets, which trl needs, is not installed")

PEER = "12D3KooWQPfBmCkGTXPoCXzwPpGP7AZ9KTbB6sVg4aN8AsxKGoBf"
SYMBOLS, PAD, EOS = 15, 13, 14
GROUPS, SIZE, TOKENS_MAX = 3, 4, 8
TRL_EPSILON = 1e-4
UNREACHED = 1e9
"""TRL insists on a bound."""

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about names that trl uses


def small_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SYMBOLS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=12,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.3,  # far from uniform: tokens differ in probability
    )
    return LlamaForCausalLM(config).eval()


def move(model, by=0.03):
    """As an optimiser update would: so that rho is not 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)


def logprobs_of(model, arrays):
    """log pi of each sampled token, in the order of the mask, from a plain log-softmax."""
    tokens = torch.from_numpy(arrays.tokens)
    table = model(input_ids=tokens).logits[:, :-1].log_softmax(dim=-1)
    chosen = table.gather(2, tokens[:, 1:, None])[:, :, 0]
    return chosen[torch.from_numpy(arrays.mask)[:, 1:]]


@pytest.fixture(scope="module")
def batch():
    """Groups of different lengths; what the sampler says is off by up to e^1.5 either way."""
    rng = np.random.default_rng(3)
    model = small_model()
    groups = []
    for ordinal in range(GROUPS):
        prompt = rng.integers(0, 12, size=2 + ordinal).tolist()
        rollouts = []
        for sample in range(SIZE):
            response = [*rng.integers(0, 12, size=rng.integers(0, TOKENS_MAX)).tolist(), EOS]
            with torch.no_grad():
                table = model(input_ids=torch.tensor([prompt + response])).logits[0].log_softmax(dim=-1)
            exact = np.array([float(table[len(prompt) + at - 1, token]) for at, token in enumerate(response)])
            rollouts.append(
                AdmittedRollout(
                    sequence=1,
                    lease_id=ordinal.to_bytes(8, "big") + sample.to_bytes(8, "big"),
                    ordinal=ordinal,
                    sample=sample,
                    peer=PEER,
                    version=0,
                    prompt_tokens=pack_tokens(prompt),
                    tokens=pack_tokens(response),
                    logprobs=pack_logprobs(np.minimum(exact + rng.uniform(-1.5, 1.5, len(exact)), 0.0)),
                    finish="stop",
                    temperature=1.0,
                    reward=float(rng.integers(0, 3)),
                )
            )
        groups.append(Group(ordinal, tuple(rollouts)))
    return Batch(0, tuple(groups))


@pytest.fixture
def theirs(tmp_path, batch):
    """TRL's trainer on a model like ours, whose generation is the batch."""

    def make(model, *, sampler_known=True, **options):
        rewards = [rollout.reward for rollout in batch.rollouts]
        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            per_device_train_batch_size=GROUPS * SIZE,
            per_device_eval_batch_size=GROUPS * SIZE,
            num_generations=SIZE,
            max_completion_length=TOKENS_MAX,
            vllm_importance_sampling_mode="token_truncate",
            **{"vllm_importance_sampling_clip_min": None} | options,
        )
        symbols = Tokenizer(models.WordLevel({str(symbol): symbol for symbol in range(SYMBOLS)}, unk_token="0"))
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: rewards,
            args=arguments,
            train_dataset=datasets.Dataset.from_list([{"prompt": "1"}] * GROUPS),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=symbols, pad_token=str(PAD), eos_token=str(EOS), padding_side="left"
            ),
        )
        trainer.use_vllm = sampler_known  # set late: nothing is generated, so none is needed
        model.eval()
        tokens = [np.frombuffer(rollout.tokens, "<i4").tolist() for rollout in batch.rollouts]
        trainer._generate = lambda prompts: (
            [np.frombuffer(rollout.prompt_tokens, "<i4").tolist() for rollout in batch.rollouts],
            tokens,
            None,
            [""] * len(tokens),
            [np.frombuffer(rollout.logprobs, "<f4").tolist() for rollout in batch.rollouts] if sampler_known else None,
            {},
            None,
            None,
        )
        return trainer, trainer._generate_and_score_completions([{"prompt": "1"}] * len(tokens))

    return make


def our_update(batch, objective, *, sampler_known=True, reference=None):
    """Loss and gradients of one update on the whole batch, by our functions."""
    model = small_model()
    arrays = collate(batch, divide_by_std=False)
    with torch.no_grad():
        old = logprobs_of(model, arrays)
    move(model)
    mask = torch.from_numpy(arrays.mask)
    sampler = torch.from_numpy(arrays.sampler_logprobs)[mask] if sampler_known else old
    lengths = mask.sum(dim=1)
    parts = grpo_loss(
        logprobs_of(model, arrays),
        old,
        importance_weights(old, sampler, objective.ratio_cap),
        torch.from_numpy(arrays.advantages).repeat_interleave(lengths),
        objective,
        reference,
        token_scales(lengths, objective).repeat_interleave(lengths),
    )
    parts.loss_sum.backward()
    return parts, gradients(model)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_update(loss, grads, their_loss, their_grads):
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-4, abs=1e-6)
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, their_grads[name], rtol=1e-3, atol=1e-5)


AGGREGATIONS = [
    ("grpo", "sequence"),
    ("bnpo", "token"),  # its local batch is the whole update here
    ("dapo", "token"),  # one update a step
    ("dr_grpo", "constant"),
]


@pytest.mark.parametrize(("loss_type", "aggregation"), AGGREGATIONS)
@pytest.mark.parametrize(("high", "cap"), [(0.2, 2.0), (0.28, 2.0), (0.28, None)])
def test_loss_and_gradient_are_trls(batch, theirs, loss_type, aggregation, high, cap):
    """Each aggregation, symmetric and asymmetric clip, C and none: the same loss, the same gradient of each weight."""
    objective = Objective(0.2, high, cap, aggregation=aggregation, aggregation_tokens=TOKENS_MAX)
    parts, grads = our_update(batch, objective)
    model = small_model()
    trainer, inputs = theirs(
        model,
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=high,
        scale_rewards="none",
        vllm_importance_sampling_clip_max=UNREACHED if cap is None else cap,
        beta=0.0,
    )
    move(model)
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert_same_update(parts.loss_sum, grads, loss, gradients(model))
    assert parts.clipped > 0  # else the range was not tried
    shares = trainer._metrics["eval"]
    tokens = int(inputs["completion_mask"].sum())
    assert int(parts.clipped_low) / tokens == pytest.approx(shares["clip_ratio/low_mean"][-1])
    assert int(parts.clipped_high) / tokens == pytest.approx(shares["clip_ratio/high_mean"][-1])


def test_the_ratio_to_the_sampler_is_trls(batch, theirs):
    """min(pi_old / pi_sampler, C), token by token; some are truncated and some are not."""
    _, inputs = theirs(small_model(), vllm_importance_sampling_clip_max=2.0, beta=0.0)
    arrays = collate(batch)
    with torch.no_grad():
        old = logprobs_of(small_model(), arrays)
    ours = importance_weights(old, torch.from_numpy(arrays.sampler_logprobs[arrays.mask]), 2.0)
    mask = inputs["completion_mask"].bool()
    torch.testing.assert_close(ours, inputs["importance_sampling_ratio"][mask], rtol=1e-4, atol=1e-5)
    assert 0 < int((ours == 2.0).sum()) < len(ours)


@pytest.mark.parametrize(("loss_type", "aggregation"), AGGREGATIONS)
def test_the_kl_term_is_trls_where_the_sampler_is_the_learner(batch, theirs, loss_type, aggregation):
    """k3 to the reference with weight beta. TRL puts it beside w, the paper under it: w is 1 here. Not times rho."""
    beta = 0.3
    model = small_model()
    options = {"loss_type": loss_type, "scale_rewards": "none", "use_bias_correction_kl": False}
    trainer, inputs = theirs(model, sampler_known=False, beta=0.0, **options)
    trainer.beta = beta  # set late: else it would load the reference from a folder
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        old, *_ = trainer._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
    sampled = inputs["completion_mask"].bool()
    reference = old + torch.linspace(-1, 1, old.numel()).reshape(old.shape)
    inputs |= {"old_per_token_logps": old, "ref_per_token_logps": reference}
    move(model)
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    objective = Objective(kl_weight=beta, aggregation=aggregation, aggregation_tokens=TOKENS_MAX)
    parts, grads = our_update(batch, objective, sampler_known=False, reference=reference[sampled])
    assert_same_update(parts.loss_sum, grads, loss, gradients(model))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_are_trls(batch, theirs, scale):
    """Reward less the group's mean; divided by the spread, the two differ only in n - 1 for n, and in epsilon."""
    _, inputs = theirs(small_model(), scale_rewards=scale, beta=0.0)
    ours = collate(batch, divide_by_std=scale == "group").advantages.astype(np.float64)
    if scale == "group":
        spreads = [np.std([rollout.reward for rollout in group.rollouts]) for group in batch.groups]
        factors = [(s + EPSILON) / (s * math.sqrt(SIZE / (SIZE - 1)) + TRL_EPSILON) for s in spreads]
        ours = ours * np.repeat(factors, SIZE)
    np.testing.assert_allclose(ours, inputs["advantages"].double().numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(ours).max() > 0.5
