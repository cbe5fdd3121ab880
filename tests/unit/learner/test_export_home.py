"""What was trained, out of a learner's home, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contract.llama_reference import torch_logprobs
from contract.small_models import write_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from echo2.learner.config import MODEL_DIR_FILE, AdapterSettings, LearnerConfig
from echo2.learner.export_home import export_home
from echo2.learner.interfaces import Progress
from echo2.learner.main import app
from echo2.learner.prepare import prepare_from
from echo2.learner.trainer import TorchTrainer
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity

torch.set_num_threads(1)

COORDINATOR = Identity(b"c" * 32).peer_id
ROW = [5, 7, 300, 11, 12]


@pytest.fixture
def world(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hub", "qwen3")
    prepare_from(tmp_path / "hub", tmp_path / "model")
    return tmp_path


async def trained(world: Path, adapter: AdapterSettings | None = None) -> TorchTrainer:
    """A learner whose weights have moved, and its checkpoint."""
    trainer = TorchTrainer(
        LearnerConfig(
            home=world / "home",
            model_dir=world / "model",
            run="demo",
            coordinator=f"/ip4/127.0.0.1/tcp/1/p2p/{COORDINATOR}",
            adapter=adapter,
        )
    )
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += 0.02
    await trainer.save(Progress(run="demo", epoch=0, version=4))
    (world / "home" / MODEL_DIR_FILE).write_text(f"{world / 'model'}\n")
    return trainer


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=4, targets=("q_proj", "down_proj"))])
async def test_the_folder_computes_what_the_learner_does(world: Path, adapter):
    """With all weights trained, or with an adapter, which is folded in; transformers reads it like any other."""
    trainer = await trained(world, adapter)
    result = CliRunner().invoke(app, ["export-hf", str(world / "home"), "--out", str(world / "out")])
    assert result.exit_code == 0, result.exception
    assert "version 4 of the run demo, f32" in result.stdout
    model = AutoModelForCausalLM.from_pretrained(world / "out", local_files_only=True)
    ours = torch_logprobs(trainer.model, ROW)
    assert abs(torch_logprobs(model, ROW) - ours).max() < 1e-5
    assert abs(torch_logprobs(AutoModelForCausalLM.from_pretrained(world / "hub"), ROW) - ours).max() > 0.01
    prepare_from(world / "out", world / "again")


async def test_a_smaller_format_is_for_the_asking(world: Path):
    """bf16 is half the size, and the file says so."""
    await trained(world)
    for dtype in ("f32", "bf16"):
        export_home(world / "home", world / dtype, model_dir=None, dtype=dtype)
    whole, half = ((world / dtype / "model.safetensors").stat().st_size for dtype in ("f32", "bf16"))
    assert 1.9 < whole / half < 2
    assert AutoModelForCausalLM.from_pretrained(world / "bf16").dtype == torch.bfloat16


async def test_mistakes_are_told_in_one_line_and_leave_nothing(world: Path):
    """No checkpoint, no model, another model, a folder in use, a format that does not exist."""
    (world / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="has no checkpoint"):
        export_home(world / "empty", world / "out", model_dir=world / "model", dtype="f32")
    await trained(world, AdapterSettings(rank=4))
    write_folder(world / "hub2", "qwen2")
    prepare_from(world / "hub2", world / "other")
    with pytest.raises(ConfigurationError, match="another base model"):
        export_home(world / "home", world / "out", model_dir=world / "other", dtype="f32")
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        export_home(world / "home", world / "hub", model_dir=None, dtype="f32")
    result = CliRunner().invoke(app, ["export-hf", str(world / "home"), "--out", str(world / "out"), "--dtype", "f8"])
    assert "--dtype f8 is not one of" in str(result.exception)
    assert not (world / "out").exists()


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=4)])
async def test_a_base_that_is_gone_is_named(world: Path, adapter):
    """What is missing, and where it was looked for: not the folder that was to be made, and no library's words."""
    await trained(world, adapter)
    gone = world / "gone"
    with pytest.raises(ConfigurationError, match=f"there is no folder {gone}, where .* --model-dir"):
        export_home(world / "home", world / "out", model_dir=gone, dtype="f32")
    (world / "model").rename(gone)
    with pytest.raises(ConfigurationError, match=f"there is no folder {world / 'model'}, where"):
        export_home(world / "home", world / "out", model_dir=None, dtype="f32")
    (gone / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=f"{gone / 'model.safetensors'}, cannot be read: No such file"):
        export_home(world / "home", world / "out", model_dir=gone, dtype="f32")
    assert not (world / "out").exists()


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=4)])
async def test_a_damaged_model_folder_is_named(world: Path, adapter):
    """Its config or its tokenizer torn, after the run began."""
    await trained(world, adapter)
    for name in ("config.json", "tokenizer.json"):
        path = world / "model" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ConfigurationError, match=str(path)):
            export_home(world / "home", world / "out", model_dir=None, dtype="f32")
        path.write_bytes(whole)
    assert not (world / "out").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"a\x00b", b"x" * (2 << 20)])
async def test_a_damaged_note_of_the_model_is_named(world: Path, content: bytes):
    """The file in the home, and the option that does without it."""
    await trained(world)
    (world / "home" / MODEL_DIR_FILE).write_bytes(content)
    with pytest.raises(ConfigurationError, match=str(world / "home" / MODEL_DIR_FILE)):
        export_home(world / "home", world / "out", model_dir=None, dtype="f32")


async def test_a_name_that_is_too_long_is_told(world: Path):
    """In one line, before anything is made."""
    await trained(world)
    with pytest.raises(ConfigurationError, match="cannot be written: File name too long"):
        export_home(world / "home", world / ("a" * 300), model_dir=None, dtype="f32")


async def test_a_damaged_checkpoint_is_passed_over(world: Path):
    """As when the learner starts; without another one a person is told."""
    trainer = await trained(world)
    await trainer.save(Progress(run="demo", epoch=0, version=6))
    path = world / "home" / "checkpoints" / "e000000-v00000006" / "progress.json"
    path.write_text(path.read_text().replace('"files"', '"filez"'))
    assert export_home(world / "home", world / "out", model_dir=None, dtype="f32").version == 4


async def test_a_full_checkpoint_of_another_base_of_the_same_shapes_is_refused(world: Path):
    """Its tokenizer would go out with weights that know another."""
    await trained(world)
    weights = load_file(world / "hub" / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, world / "hub" / "model.safetensors")
    prepare_from(world / "hub", world / "other")
    with pytest.raises(ConfigurationError, match=f"another base model than that in {world / 'other'}"):
        export_home(world / "home", world / "out", model_dir=world / "other", dtype="f32")


async def test_a_full_checkpoint_of_another_model_is_refused(world: Path):
    """By the base that it names."""
    await trained(world)
    write_folder(world / "hub2", "llama")
    prepare_from(world / "hub2", world / "other")
    with pytest.raises(ConfigurationError, match="another base model"):
        export_home(world / "home", world / "out", model_dir=world / "other", dtype="f32")
