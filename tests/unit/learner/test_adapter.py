"""LoRA adapters: what is trained, what is kept, and that llama.cpp computes the same with one as torch does."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from contract.llama_reference import llama_logprobs, llama_model, torch_logprobs
from contract.small_models import write_folder

from echo2.learner.adapter import MergedWeights, add_adapter, base_of, export_adapter, frozen_copy
from echo2.learner.architectures import parameter_shapes
from echo2.learner.config import AdapterSettings
from echo2.learner.gguf_export import export_gguf, export_weights
from echo2.learner.policy import load_policy
from echo2.learner.prepare import prepare_from
from echo2.learner.vocabulary import load_vocabulary
from echo2.learner.weights_file import Weights
from echo2.p2p.errors import ConfigurationError

torch.set_num_threads(1)

RANK, ALPHA = 3, 12.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a model's name to its prepared folder."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            write_folder(folder / "hub", name)
            prepare_from(folder / "hub", folder / "model")
            made[name] = folder / "model"
        return made[name]

    return get


def adapted(folder: Path, targets: tuple[str, ...]):
    """The policy with an adapter that has learnt something, and the adapter's weights."""
    policy, _ = load_policy(folder)
    add_adapter(policy, AdapterSettings(rank=RANK, alpha=ALPHA, targets=targets), seed=4)
    weights = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in weights.items():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=generator)
    return policy, {name: parameter.detach() for name, parameter in weights.items()}


def row_of(policy) -> list[int]:
    rng = random.Random(5)
    return [rng.randrange(policy.config.vocab_size) for _ in range(60)]


@pytest.mark.parametrize("targets", [*((target,) for target in TARGETS), TARGETS], ids=lambda t: "+".join(t)[:9])
@pytest.mark.parametrize("name", ["llama", "llama-3", "qwen2", "qwen3"])
def test_base_and_adapter_in_llama_cpp_are_the_merged_model(folders, tmp_path: Path, name: str, targets):
    """In f32 within 1e-4 of torch at every token, for each target alone and for all; so is the merged snapshot."""
    folder = folders(name)
    base, _ = load_policy(folder)
    policy, weights = adapted(folder, targets)
    vocabulary, row = load_vocabulary(folder), row_of(policy)
    expected = torch_logprobs(policy, row)
    assert np.abs(expected - torch_logprobs(base, row)).max() > 0.1, "an adapter that changes nothing shows nothing"
    whole = export_gguf(base, vocabulary, tmp_path / "base.gguf", "f32")
    adapter = export_adapter(policy.config, weights, ALPHA, tmp_path / "adapter.gguf", "f32")
    with llama_model(whole) as loaded:
        assert np.abs(llama_logprobs(loaded, row, adapter=adapter) - expected).max() < 1e-4
        assert np.abs(llama_logprobs(loaded, row) - torch_logprobs(base, row)).max() < 1e-4
    with Weights(folder) as stored:
        merged = MergedWeights(stored, parameter_shapes(base.config), weights, ALPHA)
        path = export_weights(base.config, merged, vocabulary, tmp_path / "merged.gguf", "f32")
    with llama_model(path) as loaded:
        assert np.abs(llama_logprobs(loaded, row) - expected).max() < 1e-4


@pytest.mark.parametrize("domain", ["f16", "bf16", "q8_0"])
def test_an_adapter_goes_on_a_base_of_any_format(folders, tmp_path: Path, domain):
    """The adapter itself in f16: the KL to torch is that of the base's rounding."""
    base, _ = load_policy(folders("qwen3"))
    policy, weights = adapted(folders("qwen3"), TARGETS)
    row = row_of(policy)
    expected = torch_logprobs(policy, row)
    whole = export_gguf(base, load_vocabulary(folders("qwen3")), tmp_path / "base.gguf", domain)
    adapter = export_adapter(policy.config, weights, ALPHA, tmp_path / "adapter.gguf", domain)
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(adapter).tensors}
    assert kinds == {"F16"}
    with llama_model(whole) as loaded:
        kl = (np.exp(expected) * (expected - llama_logprobs(loaded, row, adapter=adapter))).sum(axis=1).mean()
    assert 0 < kl < 2e-3


def test_a_new_adapter_is_the_base_model(folders, tmp_path: Path):
    """B begins at zero: version 0, published whole, is exactly the base."""
    base, _ = load_policy(folders("llama"))
    policy, _ = load_policy(folders("llama"))
    add_adapter(policy, AdapterSettings(rank=4), seed=1)
    weights = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    assert np.abs(torch_logprobs(policy, row_of(policy)) - torch_logprobs(base, row_of(policy))).max() == 0
    with Weights(folders("llama")) as stored:
        merged = MergedWeights(stored, parameter_shapes(base.config), weights, 32.0)
        assert all(torch.equal(merged[name], parameter) for name, parameter in base.named_parameters())
        assert len(merged) == len(list(base.named_parameters()))


def test_the_same_seed_begins_with_the_same_adapter(folders):
    """A follows from the run's seed, and torch's own generator is left as it was."""
    state = torch.get_rng_state()
    adapters = []
    for seed in (1, 1, 2):
        policy, _ = load_policy(folders("llama"))
        add_adapter(policy, AdapterSettings(rank=4), seed=seed)
        adapters.append(torch.cat([p.detach().flatten() for p in policy.parameters() if p.requires_grad]))
    assert torch.equal(adapters[0], adapters[1])
    assert not torch.equal(adapters[0], adapters[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_only_the_adapter_has_gradients(folders):
    """The base is frozen, and the adapter's own weights are few."""
    policy, _ = load_policy(folders("qwen2"))
    whole = sum(parameter.numel() for parameter in policy.parameters())
    add_adapter(policy, AdapterSettings(rank=2, targets=("q_proj",)), seed=0)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert all(".q_proj.lora_" in name for name in trained)
    assert sum(parameter.numel() for parameter in trained.values()) == 3 * 2 * (64 + 64)
    assert sum(parameter.numel() for parameter in policy.parameters()) - whole == 3 * 2 * (64 + 64)


def test_a_frozen_copy_shares_its_weights_and_not_its_adapter(folders):
    """The KL's reference costs no second model in memory, and stays the base."""
    policy, _ = load_policy(folders("llama"))
    before = torch_logprobs(policy, row_of(policy))
    reference = frozen_copy(policy, shared=True)
    add_adapter(policy, AdapterSettings(rank=4, targets=TARGETS), seed=1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    ours = policy.model.layers[0].self_attn.q_proj.base_layer.weight
    assert reference.model.layers[0].self_attn.q_proj.weight.data_ptr() == ours.data_ptr()
    assert np.abs(torch_logprobs(reference, row_of(policy)) - before).max() == 0
    assert np.abs(torch_logprobs(policy, row_of(policy)) - before).max() > 0.1


def test_a_checkpoint_belongs_to_one_base_and_one_alpha(folders, tmp_path: Path):
    """Another base, another alpha, or no adapter at all is refused with the reason."""
    folder = folders("llama")
    base = base_of(folder, ALPHA)
    base.check(base.state(), folder)
    with pytest.raises(ConfigurationError, match="another base model"):
        base_of(folders("qwen2"), ALPHA).check(base.state(), folder)
    with pytest.raises(ConfigurationError, match=r"adapter\.alpha = 12; set"):
        base_of(folder, 13.0).check(base.state(), folder)
    with pytest.raises(ConfigurationError, match="another base model"):
        base.check({}, folder)


def test_a_run_without_an_adapter_belongs_to_one_base_too(folders):
    """Another base is refused, and an adapter; a checkpoint of the first releases, which names no base, is not."""
    folder = folders("llama")
    base = base_of(folder, None)
    base.check(base.state(), folder)
    base.check({}, folder)
    with pytest.raises(ConfigurationError, match="another base model"):
        base_of(folders("qwen2"), None).check(base.state(), folder)
    with pytest.raises(ConfigurationError, match="trained without an adapter"):
        base_of(folder, ALPHA).check(base.state(), folder)
    with pytest.raises(ConfigurationError, match=r"trained with adapter\.alpha = 12"):
        base.check(base_of(folder, ALPHA).state(), folder)


def test_a_base_that_is_gone_is_named(tmp_path: Path):
    """The folder to look for is in the message."""
    with pytest.raises(ConfigurationError, match=f"{tmp_path / 'gone'}.*cannot be read: No such file"):
        base_of(tmp_path / "gone", ALPHA)


def test_an_adapter_of_another_model_is_refused(folders):
    """By name, before anything is computed."""
    _, weights = adapted(folders("qwen3"), ("q_proj",))
    name = "model.layers.7.self_attn.q_proj.lora_A.default.weight"
    with Weights(folders("qwen3")) as stored, pytest.raises(ConfigurationError, match=r"layers\.7"):
        MergedWeights(
            stored,
            parameter_shapes(load_policy(folders("qwen3"))[0].config),
            {**weights, name: weights[next(iter(weights))]},
            ALPHA,
        )


def test_equal_adapters_are_equal_bytes(folders, tmp_path: Path):
    """Neither date nor path is in the file."""
    policy, weights = adapted(folders("llama"), ("q_proj", "v_proj"))
    first = export_adapter(policy.config, weights, ALPHA, tmp_path / "a.gguf", "q8_0").read_bytes()
    assert export_adapter(policy.config, weights, ALPHA, tmp_path / "b.gguf", "q8_0").read_bytes() == first
    with pytest.raises(FileExistsError):
        export_adapter(policy.config, weights, ALPHA, tmp_path / "a.gguf", "q8_0")
