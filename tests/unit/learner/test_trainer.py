"""The torch trainer on a small random model: what a step changes, what it must not, and what survives a restart."""

import json
import math

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from echo2.learner.adapter import Base
from echo2.learner.config import AdapterSettings, LearnerConfig, ObjectiveSettings, TrainSettings
from echo2.learner.interfaces import Batch, Group, Progress
from echo2.learner.policy import save_policy, token_logprobs
from echo2.learner.trainer import TorchTrainer
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.messages import AdmittedRollout
from echo2.tasks.model_card import ModelCard, tokenizer_sha256, write_model_card

NODES = [Identity(bytes([letter]) * 32).peer_id for letter in b"ab"]
COORDINATOR = Identity(b"c" * 32).peer_id
SYMBOLS = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "="]
EOS = 14


def make_model(folder, seed=0):
    folder.mkdir()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=15,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=12,
        eos_token_id=EOS,
        pad_token_id=13,
    )
    save_policy(LlamaForCausalLM(config), folder)
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(SYMBOLS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<pad>", "<eos>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    card = ModelCard(
        name="small",
        architecture="llama",
        tokenizer_sha256=tokenizer_sha256(folder),
        vocabulary_size=15,
        context_tokens=32,
        stop_ids=(EOS,),
    )
    write_model_card(folder, card)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def make(tmp_path, model_dir):
    def make(**changes):
        """A trainer; keys of [objective] and [train] are given by their own names."""
        tables = {"objective": ObjectiveSettings, "train": TrainSettings}
        changes = {"learning_rate": 1e-3} | changes
        for table, kind in tables.items():
            changes[table] = kind(**{key: changes.pop(key) for key in list(changes) if key in kind.model_fields})
        arguments = {
            "home": tmp_path / "home",
            "model_dir": model_dir,
            "run": "demo",
            "coordinator": f"/ip4/127.0.0.1/tcp/1/p2p/{COORDINATOR}",
        } | changes
        return TorchTrainer(LearnerConfig(**arguments))

    return make


def sample(model, groups=4, size=4, *, seed=0, temperature=1.0, version=0, shift=0.0, rewards=None):
    """Rollouts drawn from `model` itself, with the log-probabilities it gives them (plus `shift`)."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = rng.integers(0, 10, size=rng.integers(2, 6)).tolist()
        rollouts = []
        for s in range(size):
            response = [*rng.integers(0, 12, size=rng.integers(1, 5)).tolist(), EOS]
            tokens = torch.tensor([prompt + response])
            mask = torch.zeros_like(tokens, dtype=torch.bool)
            mask[0, len(prompt) :] = True
            with torch.no_grad():
                logprobs = token_logprobs(model, tokens, mask, temperature)[0, len(prompt) :]
            rollouts.append(
                AdmittedRollout(
                    sequence=1,
                    lease_id=g.to_bytes(8, "big") + s.to_bytes(8, "big"),
                    ordinal=g,
                    sample=s,
                    peer=NODES[s % 2],
                    version=version,
                    prompt_tokens=pack_tokens(prompt),
                    tokens=pack_tokens(response),
                    logprobs=pack_logprobs(logprobs.numpy() + shift * (s % 2)),
                    finish="stop",
                    temperature=temperature,
                    reward=float(rng.integers(0, 2)) if rewards is None else rewards(g, s),
                )
            )
        made.append(Group(g, tuple(rollouts)))
    return Batch(version, tuple(made))


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def mixed(g, s):
    return float(s % 3 == 0)


def test_lr_zero_changes_nothing_and_the_kl_stays_at_noise(make):
    """Sampler and learner are the same weights: for several steps, KL below 1e-3, ratio 1, and not one bit moves."""
    trainer = make(learning_rate=0.0, weight_decay=0.1)
    before = weights(trainer)
    for step in range(3):
        stats = trainer.train_now(sample(trainer.model, seed=step, temperature=0.8, rewards=mixed))
        assert stats.kl_sampler_learner < 1e-3
        assert stats.kl_sampler_learner < 1e-9  # f32 against f32, so really only rounding
        assert stats.ratio_mean == pytest.approx(1.0, abs=1e-5)
        assert stats.clip_share == 0.0
        assert stats.updates == 2
        assert stats.gradient_norm > 0
    assert same(before, weights(trainer))


def test_a_step_makes_better_responses_likelier(make):
    """After a few steps on one batch, tokens of rewarded responses have gained on those of the others."""
    trainer = make()
    batch = sample(trainer.model, rewards=mixed)

    def margin():
        total = 0.0
        for rollout in batch.rollouts:
            prompt, response = (np.frombuffer(b, "<i4") for b in (rollout.prompt_tokens, rollout.tokens))
            tokens = torch.tensor(np.concatenate([prompt, response])[None].astype(np.int64))
            mask = torch.zeros_like(tokens, dtype=torch.bool)
            mask[0, len(prompt) :] = True
            with torch.no_grad():
                total += (2 * rollout.reward - 1) * float(token_logprobs(trainer.model, tokens, mask).sum())
        return total

    before = margin()
    for _ in range(3):
        stats = trainer.train_now(batch)
    assert margin() > before + 0.5
    assert stats.updates == 2
    assert 0 < stats.kl_sampler_learner < 1


def test_equal_rewards_teach_nothing(make):
    """Without spread in any group there is no gradient and no movement; the groups are counted."""
    trainer = make()
    before = weights(trainer)
    stats = trainer.train_now(sample(trainer.model, rewards=lambda g, s: 1.0))
    assert same(before, weights(trainer))
    assert stats.groups_without_spread == 4
    assert stats.gradient_norm == 0.0


def test_memory_bound_and_minibatches_do_not_change_the_result(make):
    """Evaluating a few rows at a time gives the same update, up to rounding."""
    one, many = make(), make(micro_tokens=16)
    batch = sample(one.model, rewards=mixed)
    first, second = one.train_now(batch), many.train_now(batch)
    assert first.loss == pytest.approx(second.loss, abs=1e-6)
    assert first.gradient_norm == pytest.approx(second.gradient_norm, rel=1e-4)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, weights(many)[name], atol=2e-5, rtol=0)


def test_one_minibatch_is_one_update_and_a_single_group_still_makes_two(make):
    """The number of updates is the configured one even when there are fewer groups than minibatches."""
    assert make(updates_per_step=1).train_now(sample(make().model)).updates == 1
    assert make().train_now(sample(make().model, groups=1, rewards=mixed)).updates == 2


def test_a_group_of_one_and_a_batch_of_one(make):
    """The smallest batch there can be trains without a word: its advantage is zero."""
    trainer = make()
    before = weights(trainer)
    stats = trainer.train_now(sample(trainer.model, groups=1, size=1))
    assert stats.groups_without_spread == 1
    assert same(before, weights(trainer))


def test_a_sampler_that_is_off_is_seen_by_node(make):
    """The node whose log-probabilities are wrong by 0.5 shows a KL of e^-0.5 - 1 + 0.5; the other none."""
    trainer = make(learning_rate=0.0)
    stats = trainer.train_now(sample(trainer.model, shift=0.5))
    assert stats.kl_by_node[NODES[0]] == pytest.approx(0.0, abs=1e-9)
    assert stats.kl_by_node[NODES[1]] == pytest.approx(math.exp(-0.5) - 1 + 0.5, rel=1e-4)


def test_the_importance_ratio_is_truncated(make):
    """A sampler that claims impossibly small probabilities weighs C and no more."""
    trainer = make(learning_rate=0.0, ratio_cap=2.0)
    stats = trainer.train_now(sample(trainer.model, size=2, shift=-50.0))
    tokens = {0: 0, 1: 0}
    for rollout in sample(trainer.model, size=2).rollouts:
        tokens[rollout.sample] += len(rollout.tokens) // 4
    assert stats.ratio_mean == pytest.approx((tokens[0] + 2.0 * tokens[1]) / sum(tokens.values()), rel=1e-4)
    assert math.isfinite(stats.kl_sampler_learner)


def test_a_number_that_is_not_finite_costs_an_update_not_the_run(make, monkeypatch):
    """The update is left out, counted and named; weights and optimiser are as before."""
    trainer = make(updates_per_step=2)
    before = weights(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.nan))
        stats = trainer.train_now(sample(trainer.model, rewards=mixed))
    assert stats.updates == 0
    assert stats.updates_skipped == ("the gradient is not finite",) * 2
    assert same(before, weights(trainer))
    batch = sample(trainer.model, rewards=mixed)
    group = batch.groups[0]
    absurd = group.rollouts[0].model_copy(update={"reward": 1e300})  # overflows float32: an infinite advantage
    broken = Batch(0, (Group(0, (absurd, *group.rollouts[1:])), *batch.groups[1:]))
    undivided = make(updates_per_step=2, normalise_std=False, home=trainer._config.home / "other")
    stats = undivided.train_now(broken)
    assert stats.updates_skipped == ("a ratio has exploded or is not finite",)
    named = {(culprit.lease_id, culprit.sample) for culprit in stats.culprits}
    assert named <= {(rollout.lease_id, rollout.sample) for rollout in group.rollouts}
    assert (absurd.lease_id, absurd.sample) in named
    assert all(math.isfinite(value) for value in (stats.loss, stats.gradient_norm, stats.entropy, stats.ratio_mean))
    assert all(torch.isfinite(tensor).all() for tensor in weights(undivided).values())


def test_the_kl_term_holds_the_policy_back(make):
    """With a large beta the weights stay nearer to the reference."""

    def moved(**changes):
        trainer = make(**changes)
        start = weights(trainer)
        batch = sample(trainer.model, rewards=mixed)
        before = {r.lease_id: r for r in batch.rollouts}
        for _ in range(4):
            stats = trainer.train_now(batch)
        assert len(before) == 16
        assert not same(start, weights(trainer))
        return stats.kl_sampler_learner

    assert moved(kl_weight=5.0, reference="base") < moved()


async def test_a_restored_trainer_goes_on_bit_for_bit(make):
    """Weights, optimiser and generator come back: the next step is the one that would have been."""
    one = make()
    batch = sample(one.model, rewards=mixed)
    assert await one.restore() is None
    await one.train(batch)
    progress = Progress(run="demo", epoch=0, version=1, consumed=((0, 4, 15),))
    await one.save(progress)
    two = make()
    assert await two.restore() == progress
    assert same(weights(one), weights(two))
    await one.train(batch)
    await two.train(batch)
    assert same(weights(one), weights(two))


async def test_what_is_exported_is_the_checkpoint_not_the_live_weights(make):
    """Training on while a snapshot is made cannot leak into it: the same bytes come out before and after."""
    trainer = make()
    await trainer.save(Progress(run="demo", epoch=0, version=0))
    first = (await trainer.export(0, 0)).read_bytes()
    await trainer.train(sample(trainer.model, rewards=mixed))
    again = await trainer.export(0, 0)
    assert again.read_bytes() == first
    assert [path.name for path in again.parent.iterdir()] == [again.name]
    await trainer.save(Progress(run="demo", epoch=0, version=1))
    assert (await trainer.export(0, 1)).read_bytes() != first
    with pytest.raises(OSError, match=r"e000007|No such file"):
        await trainer.export(7, 7)


async def test_a_checkpoint_of_another_model_is_refused(make, tmp_path):
    """model_dir was changed under a run: said so, not trained on."""
    await make().save(Progress(run="demo", epoch=0, version=0))
    other = make_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    torch.manual_seed(1)
    save_policy(LlamaForCausalLM(LlamaConfig(**(config | {"num_hidden_layers": 1}))), other)
    with pytest.raises(ConfigurationError, match="not of the model"):
        await make(model_dir=other).restore()


async def test_a_run_goes_on_upon_the_base_it_began_with(make, tmp_path):
    """Another folder of the same shapes is another model, whatever the checkpoint's own weights are."""
    trainer = make()
    trainer.train_now(sample(trainer.model, rewards=mixed))
    await trainer.save(Progress(run="demo", epoch=0, version=1))
    other = make_model(tmp_path / "other", seed=9)
    again = make(model_dir=other)
    before = weights(again)
    with pytest.raises(ConfigurationError, match=f"another base model than that in {other}"):
        await again.restore()
    assert same(before, weights(again))
    same_weights = make_model(tmp_path / "same")
    assert (await make(model_dir=same_weights).restore()).version == 1


async def test_a_checkpoint_that_names_no_base_is_taken(make, monkeypatch):
    """Those of the first releases named the base of adapters only."""
    with monkeypatch.context() as patch:
        patch.setattr(Base, "state", lambda _: {})
        await make().save(Progress(run="demo", epoch=0, version=1))
    assert (await make().restore()).version == 1


async def test_a_cancelled_step_ends_soon_and_without_an_update(make):
    """SIGTERM does not wait for a long step: it ends between evaluations, before the weights are touched."""
    trainer = make(micro_tokens=16)
    before = weights(trainer)
    with trio.move_on_after(0) as scope:
        await trainer.train(sample(trainer.model, rewards=mixed))
    assert scope.cancelled_caught
    assert same(before, weights(trainer))


LORA = AdapterSettings(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))


def frozen(trainer):
    return {name: tensor for name, tensor in weights(trainer).items() if ".lora_" not in name}


async def test_an_adapter_learns_and_the_base_does_not_move(make):
    """KL to its own samples is noise at first; then only the adapter changes, and the policy with it."""
    trainer = make(adapter=LORA, learning_rate=1e-2)
    before, base = weights(trainer), frozen(trainer)
    assert trainer.train_now(sample(trainer.model, rewards=mixed)).kl_sampler_learner < 1e-9
    stats = trainer.train_now(sample(trainer.model, seed=1, rewards=mixed, shift=0.1))
    assert stats.gradient_norm > 0
    after = weights(trainer)
    assert all(torch.equal(base[name], after[name]) for name in base)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if ".lora_" in name}


async def test_a_checkpoint_of_an_adapter_holds_nothing_else_and_restores_bit_for_bit(make):
    """Kilobytes beside the base's megabytes; the next step is the one that would have been."""
    one = make(adapter=LORA)
    batch = sample(one.model, rewards=mixed)
    one.train_now(batch)
    progress = Progress(run="demo", epoch=0, version=1)
    await one.save(progress)
    (folder,) = (one._config.home / "checkpoints").iterdir()
    assert all(".lora_" in name for name in load_file(folder / "weights.safetensors"))
    two = make(adapter=LORA)
    assert await two.restore() == progress
    assert same(weights(one), weights(two))
    one.train_now(batch)
    two.train_now(batch)
    assert same(weights(one), weights(two))


async def test_an_adapter_is_published_by_itself_and_the_base_whole(make, model_dir):
    """The whole export of version 0 is the base's, byte for byte; later ones have the adapter folded in."""
    plain = make(home=model_dir.parent / "plain")
    await plain.save(Progress(run="demo", epoch=0, version=0))
    trainer = make(adapter=LORA)
    await trainer.save(Progress(run="demo", epoch=0, version=0))
    base = (await trainer.export(0, 0)).read_bytes()
    assert base == (await plain.export(0, 0)).read_bytes()
    for seed in range(2):
        trainer.train_now(sample(trainer.model, seed=seed, rewards=mixed))
    await trainer.save(Progress(run="demo", epoch=0, version=2))
    adapter = (await trainer.export(0, 2, adapter=True)).read_bytes()
    assert (await trainer.export(0, 2, adapter=True)).read_bytes() == adapter
    whole = (await trainer.export(0, 2)).read_bytes()
    assert len(whole) == len(base)
    assert whole != base
    assert adapter != whole


async def test_another_adapter_or_base_than_the_checkpoints_is_refused(make, tmp_path):
    """Rank, targets, alpha, or the weights below: each changed under a run is told, not trained on."""
    await make(adapter=LORA).save(Progress(run="demo", epoch=0, version=0))
    for changes in ({"rank": 8}, {"targets": ("q_proj",)}, {"alpha": 16.0}):
        with pytest.raises(ConfigurationError, match="adapter"):
            await make(adapter=LORA.model_copy(update=changes)).restore()
    with pytest.raises(ConfigurationError, match="of another adapter"):
        await make().restore()
    other = make_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigurationError, match="another base model"):
        await make(adapter=LORA, model_dir=other).restore()


def test_the_reference_of_an_adapter_is_the_base(make):
    """The KL is to the model without the adapter, and grows as the adapter learns."""
    trainer = make(adapter=LORA, reference="base", kl_weight=0.01, learning_rate=1e-2)
    first = trainer.train_now(sample(trainer.model, rewards=mixed)).kl_reference
    assert first is not None
    assert first < 1e-9
    later = [trainer.train_now(sample(trainer.model, seed=s, rewards=mixed)).kl_reference for s in range(3)]
    assert later[-1] > 1e-6
