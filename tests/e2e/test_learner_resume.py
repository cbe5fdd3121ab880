"""A real learner process, killed, starved of disk and damaged: it goes on from its newest whole checkpoint, exactly."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio
from e2e.learner_feed import RUN, Feed, Strike

from echo2.learner.checkpoint import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoints
from echo2.learner.tiny import prepare_tiny
from echo2.p2p.identity import load_or_create_identity
from echo2.tasks.model_card import load_model_card

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="learners are forked here"),
]

LOOK_SECONDS = 0.002
STRIKE_SECONDS = 60.0
"""A phase that is not reached in this time is struck anyway."""
LIFE_SECONDS = 240.0
FULL = "the checkpoint cannot be written"
PHASES = ("start", "hello", "fetch", "training", "checkpointing", "saved", "exporting", "publish", "report")


class Zygote:
    def __init__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("learner_zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert json.loads(self._process.stdout.readline()) == {"ready": True}

    def start(self, **job):
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())["pid"]

    def close(self):
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    prepare_tiny(folder)
    return folder


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Learner:
    """The home of a learner, and whichever process works in it."""

    def __init__(self, folder, zygote, model_dir):
        self.folder = folder
        self.home = folder / "home"
        self.zygote, self.model_dir = zygote, model_dir
        self.peer = load_or_create_identity(self.home / "identity.key").peer_id
        self.log = folder / "learner.log"
        self.pid = None

    def feed(self, **options):
        return Feed(self.peer, load_model_card(self.model_dir), durable=self.newest_version, **options)

    def settings(self, address):
        config = self.folder / "learner.toml"
        config.write_text(
            f'home = "{self.home}"\ncoordinator = "{address}"\nrun = "{RUN}"\nmodel_dir = "{self.model_dir}"\n'
            'listen = ["/ip4/127.0.0.1/tcp/0"]\ncheckpoints_kept = 2\n'
        )
        return ["run", "--config", str(config)]

    def start(self, address, *, file_bytes_max=None, processes=1):
        argv = [*self.settings(address), "--processes", str(processes)]
        self.pid = self.zygote.start(argv=argv, log=str(self.log), file_bytes_max=file_bytes_max)

    @property
    def alive(self):
        return lives(self.pid)

    def helpers(self):
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def send(self, number):
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def end(self, number=signal.SIGKILL):
        self.send(number)
        with trio.fail_after(30):
            while self.alive:  # noqa: ASYNC110 - not our child: its end rings no bell
                await trio.sleep(LOOK_SECONDS)

    @contextmanager
    def running(self, address, **options):
        self.start(address, **options)
        try:
            yield
        finally:
            self.send(signal.SIGKILL)

    @property
    def checkpoints(self):
        return self.home / "checkpoints"

    def names(self):
        return sorted(path.name for path in self.checkpoints.glob("e*-v*") if path.suffix != ".partial")

    def newest_version(self):
        names = self.names()
        return int(names[-1].rpartition("-v")[2]) if names else 0

    def restored(self):
        return Checkpoints(self.checkpoints, kept=2).restore()

    def said(self):
        return self.log.read_text()


@pytest.fixture
def learner(tmp_path, zygote, model_dir):
    return Learner(tmp_path, zygote, model_dir)


async def until(holds, learner, feed):
    with trio.fail_after(LIFE_SECONDS):
        while not holds():
            assert not feed.faults
            assert learner.alive, learner.said()[-4000:]
            await trio.sleep(LOOK_SECONDS * 5)


async def look_for(learner, strike):
    """Phases that show on the disk alone."""
    known = set(learner.names())
    while not strike.due.is_set():
        if strike.phase == "start":
            strike.reached()
        elif strike.phase == "training":
            # Between two fetches and away from the disk: somewhere in the steps.
            strike.reached()
        elif strike.phase == "checkpointing" and list(learner.checkpoints.glob("*.partial")):
            strike.reached()
            while list(learner.checkpoints.glob("*.partial")) and not strike.due.is_set():  # noqa: ASYNC110
                await trio.sleep(LOOK_SECONDS)
        elif strike.phase == "saved" and set(learner.names()) - known:
            known = set(learner.names())
            strike.reached()
        elif strike.phase == "exporting" and list((learner.home / "exports").glob("*")):
            strike.reached()
            while list((learner.home / "exports").glob("*")) and not strike.due.is_set():  # noqa: ASYNC110
                await trio.sleep(LOOK_SECONDS)
        await trio.sleep(LOOK_SECONDS)


async def strike(learner, feed, plan):
    feed.strike = plan
    async with trio.open_nursery() as nursery:
        nursery.start_soon(look_for, learner, plan)
        with trio.move_on_after(STRIKE_SECONDS):
            await plan.due.wait()
        nursery.cancel_scope.cancel()
    await trio.sleep(plan.delay)
    feed.strike = None
    await learner.end()


def plan_strike(rng):
    phase = rng.choice(PHASES)
    delays = {"start": 1.5, "training": 4.0, "checkpointing": 0.03, "saved": 0.02, "exporting": 0.03}
    return Strike(phase, after=rng.choice((0, 0, 1, 2)), delay=rng.uniform(0, delays.get(phase, 0.1)))


async def storm(learner, *, kills, steps, seed):
    rng = random.Random(seed)
    feed = learner.feed(steps=steps, seed=seed)
    async with feed.open() as address:
        for number in range(kills):
            plan = plan_strike(rng)
            print(f"kill {number}: {plan}; at version {learner.newest_version()}", file=sys.stderr, flush=True)
            with learner.running(address):
                await strike(learner, feed, plan)
            assert not feed.faults
            if feed.over:
                break
        with learner.running(address):
            await until(lambda: feed.over, learner, feed)
            await learner.end(signal.SIGTERM)
    progress, _ = learner.restored()
    assert progress.version == steps
    feed.check_books(progress.consumed)
    assert len(feed.epochs) == len(set(feed.epochs))
    assert "Traceback" not in learner.said()
    return number + 1, feed


async def test_killed_a_few_times_it_consumes_each_prompt_once(learner):
    """Whatever it was at: every slot of the curriculum is consumed by one step, R a step, none staler than S."""
    await storm(learner, kills=3, steps=12, seed=4)


@pytest.mark.slow
async def test_killed_at_thirty_moments_it_consumes_each_prompt_once(learner):
    """Training, checkpointing, publishing, reporting, starting: thirty kills, and the books are exact."""
    kills, feed = await storm(learner, kills=30, steps=120, seed=1)
    assert kills == 30
    assert len(feed.epochs) > 10


def digests(folder):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (WEIGHTS_FILE, OPTIMIZER_FILE)}


async def test_resumed_it_goes_on_bit_for_bit(tmp_path, zygote, model_dir):
    """Six steps straight, and three, a kill -9 and three more: the same bytes of weights, optimiser and generator."""
    final = []
    for name, killed in (("straight", False), ("killed", True)):
        (tmp_path / name).mkdir()
        learner = Learner(tmp_path / name, zygote, model_dir)
        feed = learner.feed(steps=6, staleness_max=6, kappa=3, fixed=True, seed=7)
        async with feed.open() as address:
            if killed:
                with learner.running(address):
                    await until(lambda learner=learner: learner.newest_version() == 3, learner, feed)
                    await learner.end()
                assert learner.newest_version() == 3
            with learner.running(address):
                await until(lambda feed=feed: feed.over, learner, feed)
                await learner.end(signal.SIGTERM)
        progress, folder = learner.restored()
        assert progress.version == 6
        assert progress.epoch == (1 if killed else 0)
        feed.check_books(progress.consumed)
        final.append(digests(folder))
    assert final[0] == final[1]


@pytest.mark.parametrize("damage", ["truncated", "one bit"])
async def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(learner, damage):
    """It is passed over with a line in the log; the run goes on from the older one, under an epoch above both."""
    feed = learner.feed(steps=4, staleness_max=4, kappa=2, fixed=True)
    async with feed.open() as address:
        with learner.running(address):
            await until(lambda: feed.published[-1:] == [(0, 2)], learner, feed)
            await learner.end()
        newest = learner.checkpoints / learner.names()[-1] / WEIGHTS_FILE
        data = bytearray(newest.read_bytes())
        data[len(data) // 2] ^= 1
        newest.write_bytes(data if damage == "one bit" else data[: len(data) // 2])
        before = dict(feed.states)
        feed.states.clear()  # what the lost steps consumed is offered again, as a coordinator does that is told so
        feed.steps_of.clear()
        with learner.running(address):
            await until(lambda: feed.over, learner, feed)
            await learner.end(signal.SIGTERM)
    assert before is not None
    assert "is damaged and is passed over" in learner.said()
    progress, _ = learner.restored()
    assert (progress.version, progress.epoch) == (4, 1)
    feed.check_books(progress.consumed)


async def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(learner):
    """It waits and tells the coordinator why; once there is room it goes on, and a kill before that loses nothing."""
    optimizer_bytes_min = 2 * sum(path.stat().st_size for path in learner.model_dir.glob("model.safetensors"))
    feed = learner.feed(steps=4, staleness_max=4, kappa=2, fixed=True)
    async with feed.open() as address:
        with learner.running(address, file_bytes_max=optimizer_bytes_min - (1 << 20)):
            await until(lambda: any(FULL in said for said in feed.statuses), learner, feed)
            assert learner.restored()[0].version == 0
            await learner.end()
        assert learner.restored()[0].version == 0
        with learner.running(address, file_bytes_max=optimizer_bytes_min - (1 << 20)):
            told = len(feed.statuses)
            await until(lambda: any(FULL in said for said in feed.statuses[told:]), learner, feed)
            resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await until(lambda: feed.over, learner, feed)
            await learner.end(signal.SIGTERM)
    progress, _ = learner.restored()
    assert progress.version == 4
    feed.check_books(progress.consumed)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="helpers are found in /proc")
async def test_a_learner_of_two_processes_goes_on_whichever_is_killed_and_with_another_number(learner):
    """The first killed, its helper ends too; the helper killed, the first ends and says so; then one finishes alone."""
    feed = learner.feed(steps=6)
    async with feed.open() as address:
        with learner.running(address, processes=2):
            await until(lambda: feed.published[-1:] and feed.published[-1][1] >= 2, learner, feed)
            (helper,) = learner.helpers()
            await learner.end()
            with trio.fail_after(60):
                while lives(helper):  # noqa: ASYNC110
                    await trio.sleep(LOOK_SECONDS)
        with learner.running(address, processes=2):
            await until(lambda: feed.published[-1:] and feed.published[-1][1] >= 4, learner, feed)
            (helper,) = learner.helpers()
            os.kill(helper, signal.SIGKILL)
            with trio.fail_after(60):
                while learner.alive:  # noqa: ASYNC110
                    await trio.sleep(LOOK_SECONDS)
            assert f"error: the learner cannot go on: process 1 of 2 (pid {helper}) was killed by" in learner.said()
        with learner.running(address):
            await until(lambda: feed.over, learner, feed)
            await learner.end(signal.SIGTERM)
    progress, _ = learner.restored()
    assert progress.version == 6
    feed.check_books(progress.consumed)


@pytest.mark.slow
async def test_torchrun_starts_the_same_learner(learner):
    """The command of several machines, here with two processes on one; SIGTERM ends all of them."""
    feed = learner.feed(steps=2)
    async with feed.open() as address:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, "-m", "echo2.learner", *learner.settings(address)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with learner.log.open("wb") as log:
            process = await trio.lowlevel.open_process(command, env=environment, stdout=log, stderr=log)
        try:
            with trio.fail_after(LIFE_SECONDS):
                while not feed.over:
                    assert process.returncode is None, learner.said()[-4000:]
                    assert not feed.faults
                    await trio.sleep(LOOK_SECONDS * 5)
            process.terminate()
            with trio.fail_after(60):
                await process.wait()
        finally:
            process.kill()
    assert "process 1 of 2 is ready on cpu" in learner.said()
    progress, _ = learner.restored()
    feed.check_books(progress.consumed)
