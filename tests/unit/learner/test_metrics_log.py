"""Each step's numbers on disk, and what beside the file may fail."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.learner.metrics_log import MetricsFile, MetricsLog, plain, scalars
from echo2.p2p.messages import Culprit, DropCount, StepMetrics

FULL = Path("/dev/full")


def step(number, **changes):
    return StepMetrics(
        **{
            "step": number, "rollouts": 8, "groups": 2, "groups_without_spread": 0, "staleness": 1,
            "staleness_mean": 0.5,
            "reward_mean": 0.25, "loss": 0.1, "ratio_mean": 1.0, "clip_share": 0.0,
            "kl_sampler_learner": 0.001, "entropy": 0.5,
            "response_tokens_mean": 3.0, "gradient_norm": 1.0, "train_seconds": 2.0, "idle_seconds": 1.0,
        } | changes
    )  # fmt: skip


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


@given(lives=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.binary(max_size=40)), max_size=6))
def test_whatever_is_killed_when_each_step_is_there_once(lives, tmp_path_factory):
    """Each life trains some steps, checkpoints after some of them, and dies leaving any bytes behind."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    version = 0
    for trained, checkpointed, rubbish in [*lives, (3, 3, b"")]:
        file = MetricsFile(path)
        file.begin(version)
        for number in range(version, version + trained):
            file.step(step(number), epoch=0, wall_seconds=1.0)
        file.durable()
        version += min(trained, checkpointed)
        file.close()
        with path.open("ab") as end:
            end.write(rubbish)
    assert steps_in(path)[:version] == list(range(version))
    file.begin(version)
    assert steps_in(path) == list(range(version))
    file.close()


def test_a_line_has_every_field_of_a_step(tmp_path):
    """And the epoch and the time; lease ids in hexadecimal."""
    file = MetricsFile(tmp_path / "m" / "metrics.jsonl")
    file.begin(0)
    culprit = Culprit(
        lease_id=b"\xff" * 16, sample=3, peer="12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo", reason="NaN"
    )
    file.step(step(0, culprits=(culprit,), staleness_counts=(1, 7)), epoch=2, wall_seconds=1.5)
    (line,) = map(json.loads, (tmp_path / "m" / "metrics.jsonl").read_text().splitlines())
    assert set(line) == {*StepMetrics.model_fields, "epoch", "wall_seconds"}
    assert (line["epoch"], line["wall_seconds"], line["staleness_counts"]) == (2, 1.5, [1, 7])
    assert line["culprits"][0]["lease_id"] == "ff" * 16


@pytest.mark.skipif(not FULL.exists(), reason="a system without /dev/full")
def test_a_full_disk_keeps_the_lines_for_the_next_checkpoint(tmp_path, monkeypatch):
    """Training goes on; what waits is an OSError at the checkpoint, which waits for the disk."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.begin(0)
    file.step(step(0), epoch=0, wall_seconds=1.0)
    full = FULL.open("r+b", buffering=0)
    real, file._file = file._file, full
    monkeypatch.setattr(type(file), "_cut", lambda self: None)
    file.step(step(1), epoch=0, wall_seconds=1.0)
    with pytest.raises(OSError, match="No space left"):
        file.durable()
    file._file = real
    file.durable()
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1]
    full.close()
    file.close()


def test_numbers_for_a_board_are_finite_scalars():
    """No text, no list; drops summed over lengths; what is unknown is left out."""
    drops = (DropCount(reason="stale", tokens_max=8, count=2), DropCount(reason="stale", tokens_max=16, count=3))
    values = scalars(step(4, drops=drops, updates_skipped=("NaN",)))
    assert values["reward_mean"] == 0.25
    assert values["drops/stale"] == 5
    assert values["updates_skipped"] == 1
    assert not {"step", "kl_reference", "culprits", "drops"} & set(values)
    assert set(plain(step(4))) == set(StepMetrics.model_fields)


class Broken:
    def begin(self, version):
        """Fine."""

    def step(self, metrics, *, epoch, wall_seconds):
        raise RuntimeError("its server is gone")

    def close(self):
        raise AssertionError("left out before")


def test_a_board_that_fails_is_left_out_and_said(tmp_path, caplog):
    """The file and the run go on."""
    log = MetricsLog(MetricsFile(tmp_path / "metrics.jsonl"), [Broken()])
    log.begin(0)
    with caplog.at_level(logging.WARNING):
        log.step(step(0), epoch=0, wall_seconds=1.0)
        log.step(step(1), epoch=0, wall_seconds=1.0)
    log.durable()
    log.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1]
    assert [record.getMessage() for record in caplog.records] == ["Broken is left out from here on: its server is gone"]
