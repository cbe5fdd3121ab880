"""Two runs in a real coordinator's process: the second created over REST, nodes of the real service on real sockets."""

from __future__ import annotations

import random
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import trio
from e2e.coordinator_process import CoordinatorProcess

from echo2.coordinator.demo_process import child_environment, command
from echo2.learner.config import LearnerConfig
from echo2.learner.fake_trainer import FakeDisk, FakeTrainer
from echo2.learner.service import LearnerService
from echo2.node.config import NodeSettings
from echo2.node.fake_engine import FakeEngine, seeded_tokens
from echo2.node.papers import Papers
from echo2.node.service import NodeService
from echo2.node.spool import Spool
from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.memory_store import MemoryStore
from echo2.tasks.scorer import InlineScorer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NODES = 6
NUMBERS = {"S": 3, "kappa": 2, "R": 16, "n": 4, "tokens_max": 6, "lease_seconds": 20.0}
STEPS = {"r1": 12, "r2": 20}
TRAIN_SECONDS = 0.5
SECONDS_MAX = 240.0


def key(number):
    return Identity(number.to_bytes(32, "big"))


def create(coordinator, folder):
    """`echo2-coordinator runs create`, as an operator does it; the coordinator is not started again."""
    numbers = "".join(f"{name} = {value}\n" for name, value in NUMBERS.items())
    (folder / "run.toml").write_text(
        f'[run]\nname = "r2"\ntask = "arithmetic"\nlearner = "{key(2).peer_id}"\nsteps = {STEPS["r2"]}\n{numbers}'
    )
    argv = command("echo2-coordinator", "runs", "create", str(folder / "run.toml"), "--config", str(coordinator.config))
    done = subprocess.run(
        [*argv, "--learner", str(folder / "learner.toml")], capture_output=True, text=True, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    assert 'run = "r2"' in (folder / "learner.toml").read_text()
    return done.stdout


async def test_a_run_created_over_rest_shares_the_nodes_and_outlives_a_kill(tmp_path):
    """Both runs finish on six nodes shared two to one, over a `kill -9` in mid-run; each has its learner's sums."""
    numbers = NUMBERS | {"steps": STEPS["r1"], "weight": 2.0}
    coordinator = CoordinatorProcess(tmp_path, learner=key(1).peer_id, heartbeat_seconds=2.0, **numbers)
    spools, disks = [Spool(":memory:") for _ in range(NODES)], {run: FakeDisk() for run in STEPS}
    try:
        coordinator.start()
        await trio.to_thread.run_sync(coordinator.wait_until_it_serves)
        assert "r2 is ready, of weight 1" in await trio.to_thread.run_sync(create, coordinator, tmp_path)
        join = await trio.to_thread.run_sync(coordinator.token, NODES)
        assert join.run == "*"
        with trio.fail_after(SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for number, run in ((1, "r1"), (2, "r2")):
                    nursery.start_soon(learner, number, run, join.coordinator, disks[run])
                await until(coordinator, lambda runs: all(run["learner_connected"] for run in runs.values()))
                for number, spool in enumerate(spools):
                    nursery.start_soon(partial(node, number + 10, join, spool))
                await until(coordinator, lambda runs: sum(run["nodes"] for run in runs.values()) == NODES)
                runs = await look(coordinator)
                assert {name: run["nodes"] for name, run in runs.items()} == {"r1": 4, "r2": 2}
                await until(coordinator, lambda runs: all(run["learner_version"] >= 2 for run in runs.values()))
                coordinator.kill()
                coordinator.start()
                await trio.to_thread.run_sync(coordinator.wait_until_it_serves)
                await until(coordinator, lambda runs: all(run["state"] == "finished" for run in runs.values()))
                while any(spool.counts().spooled or spool.counts().undecided for spool in spools):  # noqa: ASYNC110
                    await trio.sleep(0.2)
                runs = await look(coordinator)
                nursery.cancel_scope.cancel()
    finally:
        coordinator.stop()
    for name, run in runs.items():
        assert run["rollouts"]["consumed"] == consumed(disks[name])
        assert run["learner_version"] == STEPS[name]
        assert run["rollouts"]["held"] == run["rollouts"]["admitted"] == 0
    submitted = sum(run["rollouts"]["submitted"] for run in runs.values())
    assert sum(spool.counts().submitted for spool in spools) == submitted
    print({name: run["nodes"] for name, run in runs.items()}, submitted)


def consumed(disk):
    """By the learner's last checkpoint."""
    return sum(
        (stop - first) * mask.bit_count() for first, stop, mask in disk.checkpoints[max(disk.checkpoints)].consumed
    )


async def learner(number, run, coordinator, disk):
    store = MemoryStore()

    def write(name, data):
        store.files[Path(name)] = data
        return Path(name)

    async with open_libp2p_transport(key(number), ["/ip4/127.0.0.1/tcp/0"]) as transport:
        await LearnerService(
            config=LearnerConfig(
                home=Path("l"),
                model_dir=Path("m"),
                run=run,
                coordinator=f"{coordinator.addresses[0]}/p2p/{coordinator.peer}",
            ),
            identity=key(number),
            transport=transport,
            coordinator=coordinator,
            run=run,
            trainer=FakeTrainer(disk=disk, write=write, train_seconds=TRAIN_SECONDS, snapshot_bytes=100_000),
            store=store,
            broadcaster=Broadcaster(
                transport, store, coordinator.peer, clock=trio.current_time, complain=lambda *_: None
            ),
            clock=trio.current_time,
            wall=time.time,
        ).run()


async def look(coordinator):
    found = await trio.to_thread.run_sync(coordinator.get, "/v1/runs")
    return {run["run"]: run for run in found}


async def until(coordinator, holds):
    while not holds(await look(coordinator)):  # noqa: ASYNC110 - another process's state
        await trio.sleep(0.2)


async def node(number, join, spool):
    async with open_libp2p_transport(key(number), []) as transport:
        await NodeService(
            config=NodeSettings(name=f"n{number}", receipts_seconds=1.0, batch=8),
            identity=key(number),
            transport=transport,
            join=join,
            engine=FakeEngine(rollout_seconds=0.05, tokens=seeded_tokens),
            sandbox=InlineScorer(),
            home=b"%16d" % number,
            store=MemoryStore(),
            spool=spool,
            papers=Papers(":memory:"),
            clock=trio.current_time,
            rng=random.Random(number),
            show=lambda _status: None,
        ).run()
