"""Checkpoints: whole or not there, whenever the process dies and whatever the disk does."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from echo2.learner import checkpoint as module
from echo2.learner.checkpoint import (
    OPTIMIZER_FILE,
    PROGRESS_FILE,
    WEIGHTS_FILE,
    Checkpoints,
    Tensors,
    load_tensors,
)
from echo2.learner.interfaces import Progress
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import Finished, StepMetrics

WEIGHTS = {"layer.weight": torch.arange(6.0).reshape(2, 3)}
OPTIMIZER = {"layer.weight/exp_avg": torch.ones(2, 3), "layer.weight/step": torch.tensor(4.0)}


def progress(version, epoch=0, **changes):
    return Progress(run="demo", epoch=epoch, version=version, **changes)


FULL = progress(
    4,
    epoch=2,
    consumed=((0, 17, 0xFFFF), (17, 18, 0xFF0F), (20, 21, 1 << 255)),
    finished=(Finished(lease_id=bytes(range(16)), sample=3, state="consumed", step=3, reason="é"),),
    steps=(
        StepMetrics(
            step=3,
            rollouts=256,
            groups=32,
            groups_without_spread=4,
            staleness=2,
            staleness_mean=1.1,
            reward_mean=1 / 3,
            loss=-0.1,
            ratio_mean=1.01,
            clip_share=0.02,
            kl_sampler_learner=1e-4,
            entropy=0.7,
            response_tokens_mean=2.9,
            gradient_norm=0.3,
            train_seconds=0.25,
            idle_seconds=0.0,
        ),
    ),
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(checkpoints, what):
    checkpoints.save(what, Tensors.of(WEIGHTS), Tensors.of(OPTIMIZER))


def newest(folder, kept=3):
    found = Checkpoints(folder, kept=kept).restore()
    return None if found is None else (found[0].epoch, found[0].version)


def test_everything_comes_back(folder):
    """Weights, optimiser and progress, to the last bit."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, FULL)
    restored, path = Checkpoints(folder, kept=3).restore()
    assert restored == FULL
    assert torch.equal(load_tensors(path, WEIGHTS_FILE)["layer.weight"], WEIGHTS["layer.weight"])
    optimizer = load_tensors(path, OPTIMIZER_FILE)
    assert set(optimizer) == set(OPTIMIZER)
    assert optimizer["layer.weight/step"].shape == ()
    assert path == checkpoints.path(2, 4)


def test_an_empty_home_has_no_checkpoint(folder):
    """A first start is no error."""
    assert Checkpoints(folder, kept=3).restore() is None
    folder.mkdir()
    assert Checkpoints(folder, kept=3).restore() is None


def test_the_newest_are_kept(folder):
    """By epoch, then version: an older version under a raised epoch is the newer checkpoint."""
    checkpoints = Checkpoints(folder, kept=2)
    for epoch, version in [(0, 0), (0, 2), (0, 4), (1, 2)]:
        save(checkpoints, progress(version, epoch))
    assert sorted(path.name for path in folder.iterdir()) == ["e000000-v00000004", "e000001-v00000002"]
    assert newest(folder) == (1, 2)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, OPTIMIZER_FILE, PROGRESS_FILE])
@pytest.mark.parametrize("damage", ["truncated", "gone", "empty", "one bit"])
def test_a_damaged_checkpoint_is_passed_over_and_its_epoch_is_not_used_again(folder, name, damage):
    """Whatever of it is missing or changed, the one before is taken, under the epoch the damaged one had."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2, 0))
    save(checkpoints, progress(4, 1))
    path = checkpoints.path(1, 4) / name
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "one bit":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(data[: 0 if damage == "empty" else len(data) // 2])
    assert newest(folder) == (1, 2)


def test_a_damaged_one_does_not_push_a_whole_one_out(folder):
    """With two kept, the two newest whole ones stay; what is damaged goes once its epoch is left behind."""
    checkpoints = Checkpoints(folder, kept=2)
    for version in (2, 4):
        save(checkpoints, progress(version))
    (checkpoints.path(0, 4) / WEIGHTS_FILE).write_bytes(b"")
    again = Checkpoints(folder, kept=2)
    assert again.restore()[0] == progress(2, 0)
    save(again, progress(2, 1))
    assert sorted(path.name for path in folder.iterdir()) == ["e000000-v00000002", "e000001-v00000002"]


def test_a_half_written_one_is_removed_when_the_disk_is_full(folder):
    """Its bytes are given back at once, and loading a tensor may be what fails."""

    def fail(name):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(folder, kept=2)
    save(checkpoints, progress(2))
    weights = Tensors.of(WEIGHTS)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(progress(4), weights, Tensors(Tensors.of(OPTIMIZER).shapes, fail))
    assert [path.name for path in folder.iterdir()] == ["e000000-v00000002"]


def test_tensors_are_asked_for_one_at_a_time(folder):
    """So a model spread over several processes is gathered a tensor at a time, widest types first."""
    asked = []
    tensors = {"rng": torch.arange(3, dtype=torch.uint8), "half": torch.ones(3, dtype=torch.bfloat16)} | WEIGHTS

    def load(name):
        asked.append(name)
        return tensors[name]

    checkpoints = Checkpoints(folder, kept=2)
    checkpoints.save(progress(2), Tensors(Tensors.of(tensors).shapes, load), Tensors.of(OPTIMIZER))
    assert asked == ["layer.weight", "half", "rng"]
    back = load_tensors(checkpoints.path(0, 2), WEIGHTS_FILE)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_when_all_are_damaged_a_person_decides(folder):
    """Starting over from the base model in silence would throw a run away."""
    save(Checkpoints(folder, kept=3), progress(2))
    (folder / "e000000-v00000002" / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigurationError, match="every checkpoint"):
        newest(folder)


def test_a_folder_named_for_another_version_is_not_trusted(folder):
    """A copied or renamed folder does not pass for a newer checkpoint."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2))
    shutil.copytree(checkpoints.path(0, 2), checkpoints.path(0, 9))
    assert newest(folder) == (0, 2)


def test_another_format_is_not_guessed_at(folder):
    """A checkpoint of a later software version is not half understood."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2))
    path = checkpoints.path(0, 2) / PROGRESS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ConfigurationError):
        newest(folder)


class Crash(Exception):
    """The process died here."""


def calls_of_a_save(monkeypatch, act):
    """Run `act(number)` before each thing that a save does to the disk; returns how to count them."""
    count = 0

    def before(function):
        def wrapped(*arguments, **keywords):
            nonlocal count
            count += 1
            act(count)
            return function(*arguments, **keywords)

        return wrapped

    monkeypatch.setattr(module.os, "fsync", before(os.fsync))
    monkeypatch.setattr(module, "write_weights", before(module.write_weights))
    monkeypatch.setattr(module.shutil, "rmtree", before(shutil.rmtree))
    for name in ("mkdir", "rename", "write_text"):
        monkeypatch.setattr(Path, name, before(getattr(Path, name)))
    return lambda: count


def crash_at(monkeypatch, number, error):
    def act(count):
        if count >= number:
            raise error

    return calls_of_a_save(monkeypatch, act)


def test_a_crash_at_any_point_leaves_the_old_or_the_new_one(folder, tmp_path, monkeypatch):
    """Killed before any single thing a save does to the disk, the next start finds a whole checkpoint, and the save
    that is then made again succeeds."""
    with monkeypatch.context() as patch:
        total = calls_of_a_save(patch, lambda number: None)
        save(Checkpoints(tmp_path / "counting", kept=1), progress(2))
        points = total()
    assert points >= 9
    seen = set()
    for number in range(1, points + 3):
        shutil.rmtree(folder, ignore_errors=True)
        save(Checkpoints(folder, kept=1), progress(2))
        with monkeypatch.context() as patch:
            crash_at(patch, number, Crash())
            with contextlib.suppress(Crash):
                save(Checkpoints(folder, kept=1), progress(4))
        found = newest(folder)
        assert found in {(0, 2), (0, 4)}
        seen.add(found)
        save(Checkpoints(folder, kept=1), progress(4))
        assert newest(folder) == (0, 4)
        assert [path.name for path in folder.iterdir()] == ["e000000-v00000004"]
    assert seen == {(0, 2), (0, 4)}


def test_a_full_disk_is_an_oserror_and_costs_nothing(folder, monkeypatch):
    """The caller waits and tries again; what was there before is still there."""
    checkpoints = Checkpoints(folder, kept=2)
    save(checkpoints, progress(2))
    full = OSError(errno.ENOSPC, "No space left on device")
    for number in range(1, 12):
        with monkeypatch.context() as patch:
            crash_at(patch, number, full)
            try:
                save(checkpoints, progress(4))
            except OSError as error:
                assert error is full  # noqa: PT017 - also when the save got through
        assert newest(folder) in {(0, 2), (0, 4)}
    save(checkpoints, progress(4))
    assert newest(folder) == (0, 4)
