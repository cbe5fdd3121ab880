"""Exported snapshots against llama.cpp itself: the same token ids, the same log-probabilities as torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("llama_cpp.llama_cpp")
gguf = pytest.importorskip("gguf")

from contract.llama_reference import F16, llama_logprobs, llama_model, llama_tokens, torch_logprobs  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from echo2.learner.architectures import gguf_tensor_name, permute_rows, unpermute_rows  # noqa: E402
from echo2.learner.gguf_export import export_gguf  # noqa: E402
from echo2.learner.prepare import prepare  # noqa: E402
from echo2.learner.tiny import SYMBOLS, tiny_model, write_tiny_card  # noqa: E402
from echo2.learner.vocabulary import load_vocabulary  # noqa: E402
from echo2.p2p.errors import ConfigurationError  # noqa: E402
from echo2.tasks.model_card import tokenizer_sha256, write_model_card  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

torch.set_num_threads(1)


def random_llama(*, heads: int, kv_heads: int, tied: bool, bias: bool = False) -> LlamaForCausalLM:
    """Weights large enough that a wrong permutation, rope base or norm shows in the first digit."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15 if parameter.ndim > 1 else 0.7)
    return model


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    prepare("tiny", folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


ROW = [6, 9, 13, 4, 14, 7, 12, 2, 5, 5, 13, 3, 14, 11, 8, 10]


def test_the_tiny_model_is_the_same_in_llama_cpp(tmp_path: Path, tiny_folder: Path, tiny: LlamaForCausalLM) -> None:
    """In f32 every log-probability of the trained tiny model is within 1e-4 of torch's."""
    path = export_gguf(tiny, load_vocabulary(tiny_folder), tmp_path / "tiny.gguf", "f32")
    with llama_model(path) as model:
        assert np.abs(llama_logprobs(model, ROW) - torch_logprobs(tiny, ROW)).max() < 1e-4


def test_the_tiny_model_in_f16_is_close(tmp_path: Path, tiny_folder: Path, tiny: LlamaForCausalLM) -> None:
    """In f16, with llama.cpp's usual f16 cache, what a node would sample from is within 0.02 of torch's."""
    path = export_gguf(tiny, load_vocabulary(tiny_folder), tmp_path / "tiny.gguf", "f16")
    reference = torch_logprobs(tiny, ROW)
    with llama_model(path) as model:
        error = np.abs(np.exp(llama_logprobs(model, ROW, F16)) - np.exp(reference)).max()
    assert error < 0.02


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tied", "bias"),
    [(4, 4, True, False), (4, 2, True, False), (4, 2, False, False), (8, 1, False, False), (4, 2, False, True)],
)
def test_random_llamas_are_the_same_in_llama_cpp(
    tmp_path: Path, tiny_folder: Path, heads: int, kv_heads: int, tied: bool, bias: bool
) -> None:
    """Grouped queries, tied and untied embeddings, biases: all within 1e-4 of torch in f32."""
    ours = random_llama(heads=heads, kv_heads=kv_heads, tied=tied, bias=bias)
    path = export_gguf(ours, load_vocabulary(tiny_folder), tmp_path / "random.gguf", "f32")
    reference = torch_logprobs(ours, ROW)
    assert np.ptp(reference) > 1, "a flat distribution would hide any mistake"
    with llama_model(path) as model:
        assert np.abs(llama_logprobs(model, ROW) - reference).max() < 1e-4


def test_tiny_token_ids_are_the_same(tmp_path: Path, tiny_folder: Path, tiny: LlamaForCausalLM) -> None:
    """Prompts, answers, markers and characters outside the vocabulary: the same ids on both sides."""
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    path = export_gguf(tiny, load_vocabulary(tiny_folder), tmp_path / "tiny.gguf")
    texts = [
        "47+8=",
        "<bos>47+8=",
        "100",
        "55<eos>",
        "<pad>",
        "==++",
        "1 2 +3 =",
        "a1b",
        "",
        "é9",
        "7\n8",
        "<bo",
        "<eos",
    ]
    with llama_model(path) as model:
        for text in texts:
            assert llama_tokens(model, text) == tokenizer.encode(text, add_special_tokens=False).ids, text
    assert tokenizer.encode("47+8=", add_special_tokens=False).ids == [7, 10, 13, 11, 14]
    assert tokenizer.decode([8, 8, 2], skip_special_tokens=True) == "55"


def test_equal_weights_give_equal_bytes(tmp_path: Path, tiny_folder: Path, tiny: LlamaForCausalLM) -> None:
    """Neither date nor path is in the file; one changed weight is."""
    vocabulary = load_vocabulary(tiny_folder)
    first = export_gguf(tiny, vocabulary, tmp_path / "a.gguf").read_bytes()
    assert export_gguf(tiny, vocabulary, tmp_path / "b.gguf").read_bytes() == first
    changed = tiny_model()
    changed.load_state_dict(tiny.state_dict())
    with torch.no_grad():
        changed.model.norm.weight[0] += 1
    assert export_gguf(changed, vocabulary, tmp_path / "c.gguf").read_bytes() != first


def test_a_snapshot_is_never_written_over(tmp_path: Path, tiny_folder: Path, tiny: LlamaForCausalLM) -> None:
    """An existing file is refused and left alone; a finished export leaves nothing else behind."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"here")
    with pytest.raises(FileExistsError, match="never written over"):
        export_gguf(tiny, load_vocabulary(tiny_folder), path)
    assert path.read_bytes() == b"here"
    export_gguf(tiny, load_vocabulary(tiny_folder), tmp_path / "y.gguf")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.gguf", "y.gguf"]


def test_a_failed_export_leaves_nothing(
    tmp_path: Path, tiny_folder: Path, tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up costs the export, not the space of half a snapshot."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_ti_data_to_file", full)
    with pytest.raises(OSError, match="No space left"):
        export_gguf(tiny, load_vocabulary(tiny_folder), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
    ],
)
def test_a_tokenizer_llama_cpp_would_not_reproduce_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Rather no export than silently other token ids."""
    card = write_tiny_card(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    write_model_card(tmp_path, card.model_copy(update={"tokenizer_sha256": tokenizer_sha256(tmp_path)}))
    with pytest.raises(ConfigurationError, match="not a tokenizer that can be exported"):
        load_vocabulary(tmp_path)


def test_a_rope_that_depends_on_the_length_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    """What llama.cpp would compute differently is not exported."""
    model = tiny_model()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigurationError, match="rope is of the type 'dynamic'"):
        export_gguf(model, load_vocabulary(tiny_folder), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_another_models_tokenizer_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    """A vocabulary of another size belongs to another model."""
    model = tiny_model()
    model.resize_token_embeddings(20)
    with pytest.raises(ConfigurationError, match="15 symbols and the model 20"):
        export_gguf(model, load_vocabulary(tiny_folder), tmp_path / "x.gguf")


def test_names_follow_ggufs_own_map() -> None:
    """Every parameter's name is the one that the gguf package would choose; unknown ones are refused."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name, _ in random_llama(heads=4, kv_heads=2, tied=False, bias=True).named_parameters():
        assert gguf_tensor_name(name) == names.get_name(name, try_suffixes=(".weight", ".bias")), name
    with pytest.raises(ConfigurationError, match="q_norm"):
        gguf_tensor_name("model.layers.0.self_attn.q_norm.weight")


def test_permuting_pairs_up_the_halves() -> None:
    """By hand: two heads of four rows each go from halves (0 1 | 2 3) to pairs (0 2)(1 3)."""
    rows = torch.arange(8.0)[:, None]
    assert permute_rows(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert permute_rows(rows[:, 0], 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@given(heads=st.integers(1, 6), half=st.integers(1, 6), columns=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_unpermuting_undoes_permuting(heads: int, half: int, columns: int) -> None:
    """Whatever the shape, the inverse restores every row."""
    weight = torch.randn(heads * half * 2, columns)
    assert torch.equal(unpermute_rows(permute_rows(weight, heads), heads), weight)
