"""Hugging Face folders in and out: what is taken, what is refused and why, and that nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from contract.llama_reference import torch_logprobs
from contract.small_models import LLAMA3, MODELS, write_folder
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from echo2.learner.hugging_face import write_folder as export_folder
from echo2.learner.main import app
from echo2.learner.policy import load_policy
from echo2.learner.prepare import new_folder, prepare_from
from echo2.learner.reading import reading
from echo2.learner.weights_file import Weights
from echo2.p2p.errors import ConfigurationError

torch.set_num_threads(1)


def change(path: Path, **values: object) -> None:
    settings = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_prepared_folder_holds_the_very_weights(tmp_path: Path, name: str, shards: int):
    """One file or shards, tied or not: every weight is the one it was, and so is what the policy computes."""
    source = write_folder(tmp_path / "hub", name, shards=shards)
    card = prepare_from(tmp_path / "hub", tmp_path / "model")
    policy, loaded = load_policy(tmp_path / "model")
    assert loaded == card
    assert card.architecture == name.partition("-")[0]
    assert card.vocabulary_size == source.config.vocab_size
    for (parameter, before), after in zip(source.named_parameters(), policy.parameters(), strict=True):
        assert torch.equal(before, after), parameter
    row = [5, 7, 11, 300, 12]
    assert abs(torch_logprobs(source, row) - torch_logprobs(policy, row)).max() < 1e-5


def test_weights_keep_their_number_format(tmp_path: Path):
    """A bf16 model's folder is as large as it was; training begins at exactly its weights."""
    source = write_folder(tmp_path / "hub", "qwen3", dtype=torch.bfloat16, shards=2)
    prepare_from(tmp_path / "hub", tmp_path / "model")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}
    policy, _ = load_policy(tmp_path / "model")
    assert all(torch.equal(a.float(), b) for a, b in zip(source.parameters(), policy.parameters(), strict=True))


def test_the_card_of_a_chat_model(tmp_path: Path):
    """Both ends of a response, the turn's own first; special tokens; the name made of the folder's."""
    write_folder(tmp_path / "My Model v1", "llama-3")
    card = prepare_from(tmp_path / "My Model v1", tmp_path / "model")
    ids = [Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).token_to_id(text) for text in LLAMA3]
    assert card.name == "My-Model-v1"
    assert card.stop_ids == (ids[4], ids[1])
    assert card.special_ids == tuple(sorted(ids))
    assert card.context_tokens == 256
    assert card.wrap("Hi").endswith("\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    assert prepare_from(tmp_path / "My Model v1", tmp_path / "again", "renamed").name == "renamed"


def test_a_prompt_in_the_card_is_what_transformers_would_render(tmp_path: Path):
    """Prefix, prompt and suffix are the same tokens that apply_chat_template gives."""
    write_folder(tmp_path / "hub", "qwen2")
    card = prepare_from(tmp_path / "hub", tmp_path / "model")
    reference = AutoTokenizer.from_pretrained(tmp_path / "hub", local_files_only=True)
    rendered = reference.apply_chat_template(
        [{"role": "user", "content": "How many?"}], add_generation_prompt=True, tokenize=False
    )
    assert card.wrap("How many?") == rendered


def test_a_base_model_begins_with_its_own_marker(tmp_path: Path):
    """Without a template the prompt stands alone, after the <bos> that its tokeniser puts before a text."""
    write_folder(tmp_path / "hub", "llama-3")
    change(tmp_path / "hub" / "tokenizer_config.json", chat_template=...)
    (tmp_path / "hub" / "generation_config.json").unlink()
    card = prepare_from(tmp_path / "hub", tmp_path / "model")
    assert (card.prompt_prefix, card.prompt_suffix, card.turn_prefix) == ("<|begin_of_text|>", "", "")
    assert len(card.stop_ids) == 1


CONFIG_CHANGES = [
    ({"model_type": "gpt2"}, "architecture 'gpt2' are not supported, only llama, qwen2, qwen3"),
    ({"model_type": "qwen3_moe"}, "architecture 'qwen3_moe' are not supported"),
    ({"model_type": 7}, "architecture 7 are not supported"),
    ({"model_type": "mistral"}, "architecture 'mistral'"),
    ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": ...}, "sliding window"),
    ({"attention_bias": True}, "biases"),
    ({"hidden_act": "gelu"}, "activation is 'gelu'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope is of the type 'yarn'"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, "rope is of the type 'dynamic'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ({"intermediate_size": 64}, r"mlp.gate_proj.weight has the shape \[96, 64\] instead of \[64, 64\]"),
    ({"num_hidden_layers": 4, "layer_types": ...}, r"model.layers.3.*is missing.*more"),
    ({"num_hidden_layers": 2, "layer_types": ...}, r"model.layers.2.*is not part of the model"),
    ({"vocab_size": 100}, "only 100 of them|does not fit|do not fit"),
    ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
]


@pytest.mark.parametrize(("changes", "says"), CONFIG_CHANGES)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(tmp_path: Path, changes: dict[str, object], says: str):
    """Before a run begins, in one sentence, and nothing is left behind."""
    write_folder(tmp_path / "hub", "qwen3")
    change(tmp_path / "hub" / "config.json", **changes)
    with pytest.raises(ConfigurationError, match=says):
        prepare_from(tmp_path / "hub", tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["hub"]


TOKENIZER_CHANGES = [
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}}, "split like one of"),
    ({"normalizer": {"type": "NFKC"}}, "without a normalizer"),
    ({"model": {"type": "Unigram", "vocab": [], "unk_id": None}}, "byte-level BPE"),
    ({"model": None}, "not a tokenizer.json"),
    ({"added_tokens": [{"id": 0, "content": "<x>", "special": True, "lstrip": True}]}, "take in the spaces"),
]


@pytest.mark.parametrize(("changes", "says"), TOKENIZER_CHANGES)
def test_a_tokenizer_that_llama_cpp_does_not_reproduce_is_refused(
    tmp_path: Path, changes: dict[str, object], says: str
):
    """Rather than published with the wrong word for its pre-tokeniser."""
    write_folder(tmp_path / "hub", "llama")
    change(tmp_path / "hub" / "tokenizer.json", **changes)
    with pytest.raises(ConfigurationError, match=says):
        prepare_from(tmp_path / "hub", tmp_path / "model")


CONFIG_MISTAKES = [
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = 'nan'.*is not a number above 0"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps = 'inf'"),
    ({"rms_norm_eps": 1.5}, "rms_norm_eps = '1.5'"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps = '0.0'"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps = '-1e-06'"),
    ({"rms_norm_eps": "x"}, "config.json cannot be used: .*rms_norm_eps"),
    ({"hidden_size": 10**30}, "config.json: hidden_size = 1000.* is not a whole number from 1 to"),
    ({"num_hidden_layers": 10**6}, "config.json: num_hidden_layers = 1000000 is not"),
    ({"num_attention_heads": 0}, "config.json: num_attention_heads = 0 is not"),
    ({"num_key_value_heads": -1}, "config.json: num_key_value_heads = -1 is not"),
    ({"vocab_size": True}, "config.json: vocab_size = true is not"),
    ({"head_dim": 1.5}, "config.json: head_dim = 1.5 is not"),
    ({"bos_token_id": -1}, "config.json: bos_token_id = -1 is not a token id"),
    ({"pad_token_id": 10**12}, "config.json: pad_token_id = 1000000000000 is not a token id"),
    ({"tie_word_embeddings": "yes"}, "config.json cannot be used: .*tie_word_embeddings"),
    ({"layer_types": ["x"]}, "config.json cannot be used"),
    ({"dtype": "evil"}, "config.json cannot be used: .*evil"),
    ({"rope_parameters": 3}, "config.json cannot be used: .*rope_parameters"),
    ({"rope_parameters": {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}}, "factor = 'x' in config.json"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta = 'inf'"),
]


@pytest.mark.parametrize(("changes", "says"), CONFIG_MISTAKES)
def test_a_configuration_that_is_no_models_is_refused(tmp_path: Path, changes: dict[str, object], says: str):
    """In one line with the key, whatever a library would have raised; sizes before anything of that size is made."""
    write_folder(tmp_path / "hub", "qwen3")
    change(tmp_path / "hub" / "config.json", **changes)
    with pytest.raises(ConfigurationError, match=says) as caught:
        prepare_from(tmp_path / "hub", tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["hub"]


TOKENIZER_MISTAKES = [
    ({"added_tokens": None}, "added_tokens: Input should be a valid list"),
    ({"added_tokens": [{}]}, r"added_tokens\.0\.id: Field required"),
    (
        {"added_tokens": [{"id": "x", "content": 3, "special": 1}]},
        r"added_tokens\.0\.id: Input should be a valid integer",
    ),
    ({"added_tokens": [{"id": -1, "content": "a", "special": True}]}, r"added_tokens\.0\.id: Input should be greater"),
    ({"pre_tokenizer": "x"}, "pre_tokenizer: Input should be a valid dictionary"),
    ({"pre_tokenizer": {"type": "Sequence"}}, "'pretokenizers' is missing"),
    ({"version": 3}, "cannot be used: invalid type"),
    ({"decoder": [1]}, "cannot be used: data did not match"),
    ({"post_processor": 3}, "cannot be used: data did not match"),
    ({"model.vocab": None}, r"model\.vocab: Input should be a valid dictionary"),
    ({"model.vocab": {"a": "b"}}, r"model\.vocab\.a: Input should be a valid integer"),
    ({"model.vocab": {"a": -1}}, r"model\.vocab\.a: Input should be greater"),
    ({"model.vocab": ...}, r"model\.vocab: Field required"),
    ({"model.merges": [3]}, r"model\.merges\.0"),
    ({"model.merges": ["q z"], "model.vocab": {"a": 0}}, "cannot be used: Token `q` out of vocabulary"),
]


@pytest.mark.parametrize(("changes", "says"), TOKENIZER_MISTAKES)
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, changes: dict[str, object], says: str):
    """In one line with the file and the key, or the place that its own library names."""
    write_folder(tmp_path / "hub", "llama")
    path = tmp_path / "hub" / "tokenizer.json"
    settings = json.loads(path.read_text())
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = settings[tables[0]] if tables else settings
        table[last] = value
        if value is ...:
            del table[last]
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigurationError, match=says) as caught:
        prepare_from(tmp_path / "hub", tmp_path / "model")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [1.5, True, "x", {}, [1, "a"], [[1]]])
def test_an_end_that_is_no_token_id_is_refused(tmp_path: Path, value: object):
    """Not rounded to another token: a response would end where the model never ends one."""
    write_folder(tmp_path / "hub", "llama")
    change(tmp_path / "hub" / "generation_config.json", eos_token_id=value)
    with pytest.raises(
        ConfigurationError, match=r"generation_config.json: eos_token_id = .* neither a token id nor a list"
    ):
        prepare_from(tmp_path / "hub", tmp_path / "model")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, number: float):
    """One of them anywhere makes every log-probability of every node NaN."""
    write_folder(tmp_path / "hub", "llama", dtype=torch.bfloat16)
    path = tmp_path / "hub" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = number
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"hub: .*model\.layers\.1\.mlp\.up_proj\.weight are not all finite"):
        prepare_from(tmp_path / "hub", tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["hub"]


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            (name, NESTED)
            for name in ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json")
        ),
        *((name, b"\xff") for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")),
        *((name, b"\xef\xbb\xbf{}") for name in ("config.json", "generation_config.json", "tokenizer_config.json")),
        *((name, b"3") for name in ("generation_config.json", "tokenizer_config.json", "chat_template.json")),
        *(("model.safetensors.index.json", content) for content in (NESTED, b"[]", b"{}", b'{"weight_map": {"a": 3}}')),
        *(("model.safetensors", content) for content in (b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}x")),
    ],
)
def test_every_damaged_file_is_named(tmp_path: Path, name: str, content: bytes):
    """Deep, binary or of another kind: one line, with the file in it."""
    write_folder(tmp_path / "hub", "llama")
    if name == "chat_template.json":
        change(tmp_path / "hub" / "tokenizer_config.json", chat_template=...)
    if name.endswith("index.json"):
        (tmp_path / "hub" / "model.safetensors").unlink()
    (tmp_path / "hub" / name).write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        prepare_from(tmp_path / "hub", tmp_path / "model")
    assert str(tmp_path / "hub" / name) in str(caught.value) or "weights do not fit" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raised", [Exception("odd"), AssertionError(), MemoryError(), RecursionError(), KeyError("x")])
def test_whatever_a_library_raises_is_the_folders_fault(raised: Exception):
    """A bare Exception, a failed assertion: one line that begins with what was read."""
    with pytest.raises(ConfigurationError, match=r"^some/file cannot be used: \S") as caught, reading("some/file"):
        raise raised
    assert caught.value.__cause__ is raised


def test_ctrl_c_is_nobodys_fault():
    """What ends the process is let through."""
    with pytest.raises(KeyboardInterrupt), reading("some/file"):
        raise KeyboardInterrupt


def test_a_name_that_is_too_long_is_told(tmp_path: Path):
    """The longest that a file system takes works; one more is refused in one line."""
    write_folder(tmp_path / "hub", "llama")
    prepare_from(tmp_path / "hub", tmp_path / ("a" * 255))
    with pytest.raises(ConfigurationError, match="cannot be written: File name too long"):
        prepare_from(tmp_path / "hub", tmp_path / ("a" * 256))


def test_merges_passed_over_are_llama_3s_alone(tmp_path: Path):
    """llama.cpp takes ignore_merges from the pre-tokeniser's word, not from the file."""
    for name, ignore in (("llama-3", False), ("qwen2", True)):
        folder = tmp_path / name
        write_folder(folder, name)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["ignore_merges"] = ignore
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ConfigurationError, match="with ignore_merges = "):
            prepare_from(folder, tmp_path / "model")


def test_two_different_tied_embeddings_are_refused(tmp_path: Path):
    """The same twice is common and taken; different ones would silently lose one."""
    source = write_folder(tmp_path / "hub", "llama")
    path = tmp_path / "hub" / "model.safetensors"
    embedding = source.model.embed_tokens.weight.detach()
    save_file({**load_file(path), "lm_head.weight": embedding.clone()}, path, {"format": "pt"})
    prepare_from(tmp_path / "hub", tmp_path / "model")
    load_policy(tmp_path / "model")
    save_file({**load_file(path), "lm_head.weight": embedding + 1}, path, {"format": "pt"})
    with pytest.raises(ConfigurationError, match="tie_word_embeddings"):
        prepare_from(tmp_path / "hub", tmp_path / "other")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff\xfe"])
def test_a_broken_folder_is_the_users_to_mend(tmp_path: Path, name: str, content: bytes | None):
    """A missing or damaged file is named, in one line."""
    write_folder(tmp_path / "hub", "qwen2")
    path = tmp_path / "hub" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=str(tmp_path / "hub")):
        prepare_from(tmp_path / "hub", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path):
    """An index may name files of its own folder only."""
    write_folder(tmp_path / "hub", "llama", shards=2)
    change(tmp_path / "hub" / "model.safetensors.index.json", weight_map={"x": "../secret.safetensors"})
    with pytest.raises(ConfigurationError, match="not a file of the folder"):
        prepare_from(tmp_path / "hub", tmp_path / "model")


@pytest.mark.parametrize("name", ["llama-3", "qwen2-untied", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_back_is_a_folder_that_transformers_reads(tmp_path: Path, name: str, dtype: torch.dtype):
    """Trained weights, the original's configuration, tokeniser and template; prepared again it is the same model."""
    write_folder(tmp_path / "hub", name)
    card = prepare_from(tmp_path / "hub", tmp_path / "model")
    policy, _ = load_policy(tmp_path / "model")
    weights = {each: parameter.detach() + 0.01 for each, parameter in policy.named_parameters()}
    with new_folder(tmp_path / "out") as folder:
        export_folder(tmp_path / "model", weights, folder, dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert model.dtype == dtype
    assert all(torch.equal(weights[each].to(dtype), parameter) for each, parameter in model.named_parameters())
    before, after = (AutoTokenizer.from_pretrained(tmp_path / f, local_files_only=True) for f in ("hub", "out"))
    assert before("Hello, wörld 123").input_ids == after("Hello, wörld 123").input_ids
    assert before.chat_template.strip() == after.chat_template.strip()
    assert prepare_from(tmp_path / "out", tmp_path / "again", card.name) == card
    with Weights(tmp_path / "out") as written:
        assert {written.dtype(each) for each in written.names} == {dtype}


def test_the_command_takes_one_source(tmp_path: Path):
    """--model or --from, not both and not neither."""
    write_folder(tmp_path / "hub", "qwen2")
    out = str(tmp_path / "model")
    for arguments in (["--model", "tiny", "--from", str(tmp_path / "hub")], []):
        result = CliRunner().invoke(app, ["prepare", *arguments, "--out", out])
        assert "name either --model" in str(result.exception)
    result = CliRunner().invoke(app, ["prepare", "--from", str(tmp_path / "hub"), "--out", out, "--name", "small"])
    assert result.exit_code == 0, result.exception
    assert "small, " in result.stdout
    assert "256 tokens of context" in result.stdout
