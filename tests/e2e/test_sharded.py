"""A learner of several processes (FSDP2 over gloo): the numbers of one process, and an end when one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unit.learner.test_trainer import make_model

from echo2.learner.launch import STORE_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(os.name != "posix", reason="torch has FSDP for gloo on POSIX only")]

HOST = Path(__file__).with_name("sharded_host.py")
END_SECONDS_MAX = 120.0
"""For a machine that is busy with other things; a lost process is noticed at once."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "small")


class Team:
    """Processes of one learner; nothing outlives the block."""

    def __init__(self, folder, model_dir, size, tasks, *, seconds=60, **config):
        self.report = folder / "report.json"
        job = folder / "job.json"
        job.write_text(
            json.dumps(
                {
                    "home": str(folder),
                    "model_dir": str(model_dir),
                    "report": str(self.report),
                    "config": config,
                    "tasks": tasks,
                    "seconds": seconds,
                }
            )
        )
        common = os.environ | {"WORLD_SIZE": str(size), STORE_VARIABLE: str(folder / "store"), "OMP_NUM_THREADS": "1"}
        common |= {"GLOO_SOCKET_IFNAME": "lo"}
        self.errors = [(folder / f"{rank}.stderr") for rank in range(size)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(HOST), str(job)],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error.open("wb"),
            )
            for rank, error in enumerate(self.errors)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    @property
    def first(self):
        return self.processes[0]

    def result(self):
        code = self.first.wait(600)
        assert code == 0, self.said()
        assert [process.wait(30) for process in self.processes] == [0] * len(self.processes), self.said()
        return json.loads(self.report.read_text())

    def said(self, rank=0):
        return self.errors[rank].read_text()[-6000:]

    def wait_for_line(self):
        return self.first.stdout.readline()

    def codes(self):
        """How each ends by itself. What the helpers hang on is closed, as it is when the first one is gone."""
        codes = [self.first.wait(END_SECONDS_MAX)]
        for process in self.processes:
            process.stdin.close()
        return codes + [process.wait(END_SECONDS_MAX) for process in self.processes[1:]]


def check_steps(report):
    assert max(report["apart"]) < 1e-5
    assert report["state"] < 1e-5
    for ours, alone in report["stats"]:
        assert ours.pop("culprits") == alone.pop("culprits")
        assert ours.pop("updates_skipped") == alone.pop("updates_skipped")
        assert ours == pytest.approx(alone, rel=1e-4, abs=1e-5)
    assert all(alone["updates"] == 2 and alone["gradient_norm"] > 0 for _, alone in report["stats"])


def check_checkpoints(report):
    assert report["same"]
    assert report["files"] == {"weights.safetensors": True, "optimizer.safetensors": True}
    assert report["exported"]
    assert report["snapshot_bytes"] > 10_000
    assert report["apart"] < 1e-5


def test_two_processes_are_one(tmp_path, model_dir):
    """Ten steps: the weights within 1e-5 and the same statistics. A checkpoint of either goes on in the other and gives
    the same bytes; an update that must be left out is left out by both, for the same rollouts."""
    with Team(tmp_path, model_dir, 2, ["same_steps", "checkpoints", "faults"]) as team:
        report = team.result()
    check_steps(report["same_steps"])
    held, whole = report["same_steps"]["shards"]
    assert held == pytest.approx(whole / 2, rel=0.1)
    check_checkpoints(report["checkpoints"])
    ours, alone = report["faults"]["seen"]
    assert ours == alone
    assert ours["skipped"]
    assert len(ours["culprits"]) == 1
    assert report["faults"]["apart"] < 1e-5


HELD = """
import sys, torch
from pathlib import Path
from torch import distributed
from echo2.learner.launch import Place
from echo2.learner.ranks import Ranks

spread, sent = distributed.broadcast, []
distributed.broadcast = lambda tensor, src: (sent.append(tensor), spread(tensor, src=src))
ranks = Ranks(Place(0, 1, 0, Path(sys.argv[1])), seconds=60)
alone = torch.zeros(1)
alone = alone._use_count()
held = 0
for _ in range(500):
    ranks.send("nothing", {}, {})
    held += sum(tensor._use_count() > alone for tensor in sent)
    sent.clear()
print(held)
"""


def test_no_thread_holds_what_was_sent(tmp_path):
    """A thread of the library that lets go of a tensor while the interpreter ends aborts the process (seen as exit code
    -6, "terminate called without an active exception"): nothing is held once a word has been said."""
    command = [sys.executable, "-c", HELD, str(tmp_path / "store")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "config"),
    [
        (
            3,
            {
                "train": {"gradient_checkpointing": True, "micro_tokens": 16, "learning_rate": 1e-3},
                "objective": {"kl_weight": 0.1, "reference": "base"},
            },
        ),
        (2, {"adapter": {"rank": 4}, "objective": {"kl_weight": 0.1, "reference": "base"}}),
        (2, {"objective": {"aggregation": "sequence", "updates_per_step": 1}, "domain": "q8_0"}),
    ],
    ids=["three, checkpointing, KL", "adapter, KL", "by sequence, q8_0"],
)
def test_other_settings_are_one_too(tmp_path, model_dir, size, config):
    """Unequal shares, recomputed activations, a reference, an adapter, another normalisation."""
    with Team(tmp_path, model_dir, size, ["same_steps", "checkpoints"], **config) as team:
        report = team.result()
    apart = 0 if config.get("objective", {}).get("updates_per_step") == 1 else 1
    for ours, alone in report["same_steps"]["stats"]:
        assert ours["updates"] == alone["updates"] == 1 + apart
    assert max(report["same_steps"]["apart"]) < 1e-5
    check_checkpoints(report["checkpoints"])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["count_for_ever", "idle"])
def test_a_process_that_dies_ends_the_learner(tmp_path, model_dir, task):
    """In a step or between steps: the first process ends with one line that says so, and the others with it."""
    with Team(tmp_path, model_dir, 3, [task]) as team:
        assert team.wait_for_line()
        team.processes[1].kill()
        assert team.codes()[0] == 1
        assert "error: the learner cannot go on" in team.said()


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_learner_in_time(tmp_path, model_dir):
    """One that is stopped answers nobody: after the bound, the first says so and ends."""
    with Team(tmp_path, model_dir, 2, ["count_for_ever"], seconds=8) as team:
        assert team.wait_for_line()
        team.processes[1].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert team.first.wait(END_SECONDS_MAX) == 1
        assert time.monotonic() - began < END_SECONDS_MAX
        assert "error: the learner cannot go on" in team.said()


@pytest.mark.slow
def test_when_the_first_process_is_killed_the_others_end(tmp_path, model_dir):
    """They hold nothing that anybody needs, and must not hold a GPU."""
    with Team(tmp_path, model_dir, 2, ["count_for_ever"]) as team:
        assert team.wait_for_line()
        team.first.kill()
        team.first.stdin.close()
        assert team.processes[1].wait(END_SECONDS_MAX) == 1


@pytest.mark.slow
def test_helpers_wait_for_their_orders_beyond_the_bound(tmp_path, model_dir):
    """A learner without rollouts has nothing to order for hours: it lets itself be heard meanwhile."""
    with Team(tmp_path, model_dir, 2, ["idle"], seconds=5) as team:
        assert team.wait_for_line()
        with contextlib.suppress(subprocess.TimeoutExpired):
            team.first.wait(15)
        team.first.stdin.close()
        assert team.result() == {"idle": {"trained": True}}
