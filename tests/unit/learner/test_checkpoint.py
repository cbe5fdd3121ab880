"""Checkpoints: whole or not there, whenever the process dies and whatever the disk does."""

import contextlib
import errno
import json
import os
import random
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


def test_another_format_is_not_guessed_at(folder, caplog):
    """A checkpoint of a later software version is not half understood."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2))
    path = checkpoints.path(0, 2) / PROGRESS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    with pytest.raises(ConfigurationError):
        newest(folder)
    assert "it is of format 3, this version reads 2" in caplog.text


def flipped(data, seed=0):
    """Every fourth byte of `data` in turn with one of its bits the other way."""
    rng = random.Random(seed)
    for place in range(seed, len(data), 4):
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        yield place, bytes(changed)


def test_no_bit_of_progress_changes_in_silence(folder, caplog):
    """Damaged or cut off at one byte after another: the older one is taken, or what was meant still stands there."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2, 2))
    save(checkpoints, FULL)
    path = checkpoints.path(2, 4) / PROGRESS_FILE
    data = path.read_bytes()
    taken = 0
    for place, changed in [*flipped(data), *((stop, data[:stop]) for stop in range(0, len(data), 16))]:
        path.write_bytes(changed)
        found, _ = Checkpoints(folder, kept=3).restore()
        assert found in (FULL, progress(2, 2)), place
        taken += found == FULL
    assert taken < 20  # white space, mostly
    assert f"{path.parent} is damaged and is passed over: {PROGRESS_FILE} is not what was written" in caplog.text


def test_a_rewritten_consumed_set_is_found_out(folder):
    """Valid JSON that says another thing: without a checksum, samples would be trained on twice, or never."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(5, consumed=((0, 40, 0xFF),)))
    path = checkpoints.path(0, 5) / PROGRESS_FILE
    text = path.read_text()
    for other in ('[0, 40, "fb"]', '[0, 10, "ff"]', '[4, 40, "ff"]'):
        path.write_text(text.replace('[0, 40, "ff"]', other))
        assert path.read_text() != text
        with pytest.raises(ConfigurationError, match="every checkpoint"):
            newest(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"[]",
        b"3",
        b"null",
        b'{"format": 1}',
        b'{"format": 1, "files": {}}',
        b'{"format": {}, "files": 3}',
        b'{"version": ' + b"9" * 5000 + b"}",
        b"\xff\xfe\x00",
    ],
    ids=["nested", "list", "number", "null", "bare", "no files", "odd", "digits", "binary"],
)
def test_whatever_progress_says_is_passed_over(folder, content):
    """No content ends the learner: it goes on from the checkpoint before."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2))
    save(checkpoints, progress(4))
    (checkpoints.path(0, 4) / PROGRESS_FILE).write_bytes(content)
    assert newest(folder) == (0, 2)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, OPTIMIZER_FILE, PROGRESS_FILE])
def test_what_may_never_end_is_not_read(folder, name):
    """A pipe or a device in a file's place is damage."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2))
    save(checkpoints, progress(4))
    path = checkpoints.path(0, 4) / name
    path.unlink()
    path.symlink_to("/dev/zero")
    assert newest(folder) == (0, 2)
    path.unlink()
    os.mkfifo(path)
    assert newest(folder) == (0, 2)


def of_format_1(path, **changes):
    value = json.loads(path.read_text()) | {"format": 1} | changes
    del value["sha256"]
    path.write_text(json.dumps(value))


def test_a_checkpoint_of_the_first_releases_is_taken_on_trust(folder, caplog):
    """It has no checksum of its own; the log says so, and the save after a start has one."""
    save(Checkpoints(folder, kept=3), FULL)
    path = folder / "e000002-v00000004" / PROGRESS_FILE
    of_format_1(path)
    assert Checkpoints(folder, kept=3).restore()[0] == FULL
    assert "of an earlier release, without a checksum" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"run": 3},
        {"version": 4.0},
        {"epoch": True},
        {"consumed": [[5, 1, "ff"]]},
        {"consumed": [["a", "b", "ff"]]},
        {"consumed": [[0, 1, "-ff"]]},
        {"consumed": [[0, 1.5, "ff"]]},
        {"sha256": None},
    ],
)
def test_what_is_taken_on_trust_must_make_sense(folder, changes):
    """What no learner writes is damage. Nor does a newer checkpoint pass for an older one by its checksum's loss."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2))
    save(checkpoints, progress(1, 1))
    path = checkpoints.path(1, 1) / PROGRESS_FILE
    if "sha256" in changes:
        path.write_text(path.read_text().replace('"sha256": "', '"sha257": "'))
    else:
        of_format_1(path, **changes)
    assert newest(folder) == (1, 2)


@pytest.mark.parametrize("kind", ["dangling", "file"])
def test_a_folder_that_is_none_is_not_an_empty_home(tmp_path, folder, kind):
    """The disk with the checkpoints is not mounted: to start over in silence would throw the run away."""
    folder.symlink_to(tmp_path / "gone") if kind == "dangling" else folder.write_text("x")
    with pytest.raises(ConfigurationError, match=f"{folder} is no folder"):
        newest(folder)


@pytest.mark.parametrize("kind", ["file", "dangling", "link"])
def test_what_is_in_a_checkpoints_way_is_named(folder, kind):
    """It is not removed, and no half-written checkpoint is left behind."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2))
    path = checkpoints.path(0, 4)
    path.write_text("x") if kind == "file" else path.symlink_to(checkpoints.path(0, 2 if kind == "link" else 3))
    with pytest.raises(OSError, match=f"{path} is in the way"):
        save(checkpoints, progress(4))
    assert sorted(entry.name for entry in folder.iterdir()) == ["e000000-v00000002", "e000000-v00000004"]
    path.unlink()
    save(checkpoints, progress(4))
    assert newest(folder) == (0, 4)


def test_a_rename_that_fails_leaves_nothing(folder, monkeypatch):
    """The bytes of a checkpoint that cannot have its name are given back."""
    checkpoints = Checkpoints(folder, kept=3)
    save(checkpoints, progress(2))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            save(checkpoints, progress(4))
    assert [entry.name for entry in folder.iterdir()] == ["e000000-v00000002"]


def test_a_name_with_an_absurd_number_is_no_checkpoint(folder):
    """An epoch of 200 digits would have to be exceeded by the next."""
    save(Checkpoints(folder, kept=3), progress(2))
    (folder / f"e{'9' * 200}-v00000001").mkdir()
    assert newest(folder) == (0, 2)


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
