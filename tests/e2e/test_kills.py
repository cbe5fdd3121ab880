"""`kill -9` of every kind of process in mid-run: the run goes on, nothing is consumed twice, nothing is lost."""

import json
from pathlib import Path

import pytest
from e2e.demo_run import DemoRun

pytestmark = pytest.mark.e2e

STEPS = 24
NODES = ("node-1", "node-2", "node-3")


async def test_a_run_survives_the_kill_of_each_of_its_processes(tmp_path):
    """Node, learner and coordinator are killed one after another; all sums, taken apart from the demo's own, agree."""
    async with DemoRun(tmp_path / "demo", "--steps", str(STEPS), "--nodes", "3", "--seed", "7") as demo:
        await demo.until_version(3)
        first = {name: demo.pid(name) for name in ("node-2", "learner", "coordinator")}
        demo.kill("node-2")
        await demo.until_version(7)
        demo.kill("learner")
        await demo.until(lambda: demo.status("learner").get("epoch") == 1, "a learner of epoch 1")
        await demo.until_version(12)
        demo.kill("coordinator")
        await demo.until_version(17)
        said = await demo.end()

        assert not {name for name, pid in first.items() if demo.pid(name) == pid}
        assert said["steps"] == STEPS
        assert said["staleness_max"] <= said["S"]
        assert max(line["staleness"] for line in demo.metrics()) <= said["S"]

        # nothing twice: neither a rollout nor a slot of a group
        slots = demo.ledger(
            "SELECT ordinal, sample, COUNT(*) FROM rollouts WHERE kind = 'train' AND state = 'consumed' "
            "GROUP BY ordinal, sample HAVING COUNT(*) > 1"
        )
        assert slots == []
        states = dict(demo.ledger("SELECT state, COUNT(*) FROM rollouts WHERE kind = 'train' GROUP BY state"))
        checkpoint = max((demo.home("learner") / "checkpoints").iterdir()) / "progress.json"
        consumed = json.loads(checkpoint.read_text())["consumed"]
        trained = sum((stop - first) * int(mask, 16).bit_count() for first, stop, mask in consumed)
        assert states["consumed"] == trained == said["rollouts"]["consumed"]

        # nothing acknowledged is lost: every slice a node may have forgotten is in the ledger
        recorded = {bytes(row[0]) for row in demo.ledger("SELECT DISTINCT lease_id FROM rollouts")}
        for node in NODES:
            acknowledged = demo.acknowledged(node)
            assert acknowledged
            assert acknowledged <= recorded
        assert sum(states.values()) == said["rollouts"]["submitted"]


async def test_a_learning_rate_of_zero_changes_nothing(tmp_path):
    """Five steps at lr = 0: the learner's log-probabilities stay the sampler's, and so does the held-out reward."""
    async with DemoRun(tmp_path / "demo", "--steps", "5", "--lr", "0", "--seed", "3") as demo:
        said = await demo.end()
        lines = demo.metrics()
        assert len(lines) == 5
        assert all(line["kl"] < 1e-3 for line in lines)
        assert abs(said["heldout_last"] - said["heldout_first"]) < 0.05
        assert demo.ledger("SELECT COUNT(*) FROM evaluations WHERE count >= 256") == [(2,)]


async def test_being_told_to_stop_leaves_no_process_behind(tmp_path):
    """SIGTERM in mid-run: exit code 143, and none of the processes it started is alive."""
    async with DemoRun(tmp_path / "demo", "--steps", "50") as demo:
        await demo.until_version(2)
        pids = [demo.pid(name) for name in ("coordinator", "learner", *NODES)]
        assert all(alive(pid) for pid in pids)
        demo.process.terminate()
        assert await demo.process.wait() == 143
        assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
