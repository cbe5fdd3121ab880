"""`echo2 demo` on real processes: it reaches the end although a node is killed, and never leaves a process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SECONDS = 300
KEYS = [
    "reward_first", "reward_last", "heldout_first", "heldout_last", "steps", "seconds", "nodes", "snapshots_published",
    "installs_per_node", "staleness_max", "S", "kappa", "rollouts", "bubble", "t_bcast_s_median", "kl_sampler_learner",
]  # fmt: skip


def start(out, *arguments):
    argv = [sys.executable, "-m", "echo2.coordinator.cli", "demo", "--json", "--out", str(out), *arguments]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes_with(text):
    """Pids of processes whose command line has `text` in it."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if text in line]


def wait_for(process, pattern):
    """Read the demo's progress lines until one matches."""
    deadline = time.monotonic() + SECONDS
    for line in process.stderr:
        assert time.monotonic() < deadline, line
        if re.search(pattern, line):
            return line
    raise AssertionError(f"the demo ended before {pattern}: {process.wait()}")


def follow_a_lease(logs):
    """What coordinator and node-2 log of the first lease that node-2 was told is safe, each in order."""
    lines = {
        name: [json.loads(line) for line in (logs / f"{name}.log").read_text().splitlines() if line.startswith("{")]
        for name in ("coordinator", "node-2")
    }
    (lease, *_) = next(line["leases"] for line in lines["node-2"] if line.get("event") == "leases_returned")
    return {name: [line for line in said if lease in line.get("leases", ())] for name, said in lines.items()}


def test_a_killed_node_costs_nothing(tmp_path):
    """With a node killed half-way the run finishes, the sums agree, and the summary is the last line of stdout."""
    out = tmp_path / "out"
    process = start(out, "--nodes", "2", "--steps", "6")
    try:
        wait_for(process, r"training .* step [1-9]")
        (node,) = processes_with(f"--home {out}/work/node-1 ")
        os.kill(node, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0, stderr
    numbers = json.loads(stdout.splitlines()[-1])
    assert list(numbers) == KEYS
    assert "node-1 was killed by SIGKILL; restart 1 of 3" in stderr
    for number in (1, 2):
        status = json.loads((out / "work" / f"node-{number}" / "status.json").read_text())
        assert status["nat"]["reachability"]["reachable"], status["nat"]
        assert status["addresses"] == status["nat"]["reachability"]["proved"]
    followed = follow_a_lease(out / "work" / "logs")
    assert [line["event"] for line in followed["coordinator"]] == ["leases_granted", "leases_returned"]
    assert all(len(line["request"]) == 12 for line in followed["coordinator"])
    assert len({line["peer"] for line in followed["coordinator"]}) == 1
    events = [line["event"] for line in followed["node-2"]]
    assert events == ["leases_received", "leases_generated", "leases_returned"]
    assert numbers["steps"] == 6
    assert numbers["snapshots_published"] == 4
    assert numbers["staleness_max"] <= 3
    assert numbers["rollouts"]["consumed"] == 6 * 256
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 6
    assert (out / "reward.png").stat().st_size > 10_000
    assert "- Yes: every rollout" in (out / "report.md").read_text()
    assert processes_with(f"{out}/work") == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ending_the_demo_leaves_no_process(tmp_path, number, code):
    """SIGTERM and Ctrl-C end every process of the demo, whatever it was doing."""
    out = tmp_path / "out"
    process = start(out, "--nodes", "2", "--steps", "100")
    try:
        wait_for(process, r"first snapshot")
        assert processes_with(f"{out}/work")
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("interrupted; stopped: coordinator, learner")
    assert stderr.splitlines()[-1].endswith(f"; logs: {out}/work/logs")
    assert processes_with(f"{out}/work") == []


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a process is not told that its parent is gone")
def test_a_killed_demo_leaves_no_process(tmp_path):
    """kill -9 leaves the demo no time; its processes see that it is gone and end by themselves."""
    out = tmp_path / "out"
    process = start(out, "--nodes", "1", "--steps", "100")
    try:
        wait_for(process, r"snapshot|measuring|training")
        assert processes_with(f"{out}/work")
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 60
    while processes_with(f"{out}/work"):
        assert time.monotonic() < deadline, processes_with(f"{out}/work")
        time.sleep(0.2)
