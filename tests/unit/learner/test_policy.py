"""Log-probabilities of sampled tokens, and model folders that are refused rather than half loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from echo2.learner.policy import (  # noqa: E402
    load_policy,
    pad_tokens,
    save_policy,
    token_logprobs,
    token_logprobs_and_entropy,
)
from echo2.learner.tiny import tiny_model, write_tiny_card  # noqa: E402
from echo2.p2p.errors import ConfigurationError  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(tiny_model(), tmp_path)
    write_tiny_card(tmp_path)
    return tmp_path


ROWS = [[4, 9, 2, 7, 30], [1, 3, 3], [8, 8, 0, 12, 5, 6, 22]]
MASKS = [[0, 0, 1, 1, 1], [0, 1, 1], [0, 0, 0, 1, 0, 1, 1]]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return pad_tokens(ROWS), pad_tokens(MASKS).bool()


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.5, 1.0, 2.0])])
def test_logprobs_are_those_of_each_row_alone(model: LlamaForCausalLM, temperature: float | torch.Tensor) -> None:
    """Padding, batching and the mask change nothing: each value is log softmax(logits / T) of the row by itself."""
    logprobs = token_logprobs(model, *batch(), temperature)
    per_row = torch.as_tensor(temperature).expand(3)
    for index, (row, mask) in enumerate(zip(ROWS, MASKS, strict=True)):
        reference = torch.log_softmax(model(torch.tensor([row])).logits[0] / per_row[index], dim=-1)
        for place in range(logprobs.shape[1]):
            if place < len(row) and mask[place]:
                assert logprobs[index, place].item() == pytest.approx(reference[place - 1, row[place]].item(), abs=1e-5)
            else:
                assert logprobs[index, place] == 0


def test_a_first_token_has_no_distribution(model: LlamaForCausalLM) -> None:
    """Nothing precedes the first token, so it is 0 even if masked in."""
    tokens = pad_tokens(ROWS)
    logprobs = token_logprobs(model, tokens, torch.ones_like(tokens, dtype=torch.bool))
    assert (logprobs[:, 0] == 0).all()
    assert (logprobs[:, 1] != 0).all()


def test_an_empty_mask_gives_zeros(model: LlamaForCausalLM) -> None:
    """A batch in which nothing was sampled is no error."""
    tokens = pad_tokens(ROWS)
    assert token_logprobs(model, tokens, torch.zeros_like(tokens, dtype=torch.bool)).abs().sum() == 0


def test_entropy_is_that_of_the_distribution_at_temperature(model: LlamaForCausalLM) -> None:
    """Entropy belongs to softmax(logits / T), in nats, and carries no gradient."""
    tokens, mask = batch()
    logprobs, entropy = token_logprobs_and_entropy(model, tokens, mask, 0.7)
    reference = torch.distributions.Categorical(logits=model(torch.tensor([ROWS[0]])).logits[0, 1] / 0.7).entropy()
    assert entropy[0, 2].item() == pytest.approx(reference.item(), abs=1e-5)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    assert torch.equal(logprobs, token_logprobs(model, tokens, mask, 0.7))


def test_gradients_are_those_of_log_softmax(model: LlamaForCausalLM) -> None:
    """Dividing logits in place disturbs no gradient."""
    tokens, mask = batch()
    token_logprobs(model, tokens, mask, 0.7).sum().backward()
    ours = model.lm_head.weight.grad.clone()
    model.zero_grad()
    logprobs = torch.log_softmax(model(tokens).logits[:, :-1] / 0.7, dim=-1)
    (logprobs.gather(-1, tokens[:, 1:, None])[..., 0] * mask[:, 1:]).sum().backward()
    assert torch.allclose(ours, model.lm_head.weight.grad, atol=1e-4)
    model.zero_grad()


def test_a_saved_policy_loads_as_it_was(folder: Path) -> None:
    """Save and load keep every weight exactly, in float32."""
    loaded, card = load_policy(folder)
    assert card.name == "tiny"
    for (name, before), after in zip(tiny_model().named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(before, after), name
        assert after.dtype == torch.float32


def test_missing_weights_are_refused(folder: Path) -> None:
    """A tensor that is not in the file is never replaced by random numbers."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(folder: Path, name: str) -> None:
    """The message names the missing file."""
    (folder / name).unlink()
    with pytest.raises(ConfigurationError, match=f"has no {name}"):
        load_policy(folder)


def test_a_truncated_weights_file_is_refused(folder: Path) -> None:
    """A file cut off is the user's to mend, in one line."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load_policy(folder)


def test_a_card_of_another_model_is_refused(folder: Path) -> None:
    """Card and config must agree on the vocabulary."""
    path = folder / "echo2-model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocabulary_size": 16}))
    with pytest.raises(ConfigurationError, match="16 symbols"):
        load_policy(folder)
