"""The learner's loop under a virtual clock: fake trainer, memory network and store, a coordinator of a few lines."""

import json
import random
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from echo2.learner.config import AdapterSettings, LearnerConfig
from echo2.learner.fake_trainer import FakeDisk, FakeTrainer
from echo2.learner.metrics_log import MetricsFile, MetricsLog
from echo2.learner.service import LearnerService
from echo2.p2p import messages as wire
from echo2.p2p.channel import answering
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.p2p.identity import Identity, open_signed
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.memory_store import MemoryStore
from echo2.tasks.model_card import ModelCard

COORDINATOR, LEARNER, NODE = Identity(b"c" * 32), Identity(b"l" * 32), Identity(b"n" * 32)
S, KAPPA, R, N, STEPS = 3, 2, 8, 4, 6
TRAIN_SECONDS = 10.0


class Coordinator:
    """Leases, nodes and scoring in one: admits groups under the newest snapshot as pacing to S allows.

    The object outlives a restart, as the ledger would.
    """

    def __init__(self, *, group_seconds=1.0, steps=STEPS):
        self.group_seconds = group_seconds
        self.steps = steps
        self.run_state = "running"
        self.rollouts = []
        self.states = {}
        self.withdraw = []
        self.manifests = []
        self.reports = []
        self.metrics = {}
        self.hellos = 0
        self.known = False
        self.refuse_publish = False
        self.durable = lambda: 0
        self.learner = LEARNER.peer_id
        self.ordinal = 0
        self.address = wire.PeerAddress(peer=COORDINATOR.peer_id, addresses=("anywhere",))
        self.changed = trio.Event()

    def descriptor(self):
        return wire.RunDescriptor(
            run="demo",
            task="sums",
            model="tiny",
            tokenizer_sha256=b"t" * 32,
            vocabulary_size=15,
            context_tokens=32,
            learner=wire.PeerAddress(peer=self.learner),
            staleness_max=S,
            publish_period=KAPPA,
            rollouts_per_step=R,
            group_size=N,
            steps=self.steps,
            sampling=wire.Sampling(temperature=1.0, tokens_max=8, stop_ids=(2,)),
        )

    @property
    def published(self):
        return [(m.epoch, m.version) for m in self.manifests]

    def admit(self, ordinal, sample, *, version, tokens=(3, 2), **changes):
        self.rollouts.append(
            wire.AdmittedRollout(
                sequence=len(self.rollouts) + 1,
                lease_id=len(self.rollouts).to_bytes(16, "big"),
                ordinal=ordinal,
                sample=sample,
                peer=NODE.peer_id,
                version=version,
                prompt_tokens=pack_tokens([1]),
                tokens=pack_tokens(tokens),
                logprobs=pack_logprobs([-1.0] * len(tokens)),
                finish="stop",
                temperature=1.0,
                reward=float(sample % 2),
                **changes,
            )
        )
        self.wake()
        return self.rollouts[-1]

    def wake(self):
        self.changed.set()
        self.changed = trio.Event()

    async def generate(self):
        """The pool: one group each `group_seconds`, never further ahead of the snapshot than S allows."""
        while True:
            await trio.sleep(self.group_seconds)
            if not self.manifests or self.run_state != "running":
                continue
            version = self.manifests[-1].version
            useful = sum(self.states.get(self.key(r)) in (None, "consumed") for r in self.rollouts)
            if useful + N <= min((version + S + 1) * R, self.steps * R):
                for sample in range(N):
                    self.admit(self.ordinal, sample, version=version)
                self.ordinal += 1

    @staticmethod
    def key(rollout):
        return rollout.lease_id, rollout.sample

    async def hello(self, peer, message):
        assert (peer, message.role) == (LEARNER.peer_id, "learner")
        self.hellos += 1
        self.known = True
        return wire.Welcome(
            wire_version=1,
            node_state="active",
            coordinator_time_seconds=0.0,
            heartbeat_seconds=10.0,
            descriptor=COORDINATOR.sign("run", self.descriptor()),
        )

    async def admitted(self, peer, message):
        if not self.known:
            raise Refused("hello-first", "say hello first", 0.0)

        def ready():
            return tuple(
                r for r in self.rollouts if r.sequence > message.after_sequence and self.key(r) not in self.states
            )

        with trio.move_on_after(message.wait_seconds):
            while not ready() and not self.withdraw:
                await self.changed.wait()
        withdraw = tuple(wire.RolloutKey(lease_id=lease, sample=sample) for lease, sample in self.withdraw)
        return wire.AdmittedReply(run_state=self.run_state, rollouts=ready()[: message.rollouts_max], withdraw=withdraw)

    async def report(self, peer, message):
        self.reports.append(message)
        for entry in message.finished:
            key = (entry.lease_id, entry.sample)
            if entry.state == "consumed":
                assert entry.step < self.durable(), "consumption was reported before it was durable"
            assert self.states.setdefault(key, entry.state) == entry.state, "a rollout changed its terminal state"
            self.withdraw = [k for k in self.withdraw if k != key]
        for metrics in message.steps:
            self.metrics[metrics.step] = metrics
        return wire.Ack(count=len(message.finished))

    async def publish(self, peer, message):
        if self.refuse_publish:
            raise Refused("busy", "not now", 1.0)
        if self.run_state == "finished":
            raise Refused("run_over", "the run is finished")
        manifest = open_signed(message.manifest, LEARNER.peer_id, "manifest", wire.Manifest)
        if manifest not in self.manifests:  # else it was sent again, its reply having been lost
            assert all((manifest.epoch, manifest.version) > order for order in self.published)
            self.manifests.append(manifest)
        plan = wire.BroadcastPlan(
            run="demo",
            manifest_hash=b"h" * 32,
            epoch=manifest.epoch,
            version=manifest.version,
            chunks=1,
            kind="star",
            root=wire.PeerAddress(peer=LEARNER.peer_id),
            entries=(),
        )
        return wire.PublishReply(plan=COORDINATOR.sign("plan", plan))

    @asynccontextmanager
    async def on(self, network):
        """The coordinator process, up for as long as the block lasts."""
        async with network.transport(COORDINATOR) as transport:
            self.known = False
            for protocol, kind, answer in (
                ("hello", wire.Hello, self.hello),
                ("admitted", wire.AdmittedRequest, self.admitted),
                ("report", wire.LearnerReport, self.report),
                ("publish", wire.PublishRequest, self.publish),
            ):
                transport.set_handler(protocol, answering(kind, answer, self.complain, wait_seconds=60.0))
            yield

    @staticmethod
    def complain(peer, error):
        raise AssertionError(f"{peer}: {error}")


class Serving:
    def serve(self):
        """Chunks are none of this test's business."""


class World:
    """What survives a crash of the learner (its disk), and what a test looks at."""

    def __init__(self, *, seed=0, **coordinator):
        self.network = MemoryNetwork(random.Random(seed), delay_seconds=0.02)
        self.coordinator = Coordinator(**coordinator)
        self.disk = FakeDisk()
        self.store = MemoryStore()
        self.card = None
        self.metrics_path = None
        self.coordinator.durable = lambda: max((version for _, version in self.disk.checkpoints), default=0)

    def write(self, name, data):
        self.store.files[Path(name)] = data
        return Path(name)

    def config(self, **changes):
        return LearnerConfig(
            home=Path("home"),
            model_dir=Path("model"),
            run="demo",
            coordinator=f"/ip4/127.0.0.1/tcp/1/p2p/{COORDINATOR.peer_id}",
            **changes,
        )

    @asynccontextmanager
    async def learner(self, *, finish=False, **changes):
        """A learner process: killed at the end of the block."""
        async with self.network.transport(LEARNER) as transport, trio.open_nursery() as nursery:
            service = LearnerService(
                config=self.config(**changes),
                identity=LEARNER,
                transport=transport,
                coordinator=self.coordinator.address,
                run="demo",
                broadcaster=Serving(),
                card=self.card,
                trainer=FakeTrainer(disk=self.disk, write=self.write, train_seconds=TRAIN_SECONDS),
                store=self.store,
                clock=trio.current_time,
                wall=trio.current_time,
                metrics=MetricsLog(MetricsFile(self.metrics_path)) if self.metrics_path else None,
            )
            nursery.start_soon(service.run)
            yield service
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def pool(self):
        async with self.coordinator.on(self.network), trio.open_nursery() as nursery:
            nursery.start_soon(self.coordinator.generate)
            yield
            nursery.cancel_scope.cancel()

    def consumed(self):
        return sum(state == "consumed" for state in self.coordinator.states.values())

    def check_finished_run(self):
        """Every step's batch is whole, fresh and consumed once; every rollout has its terminal state."""
        survived = {batch.step: batch for batch in self.disk.trained}  # a step trained again after a crash: the last
        assert sorted(survived) == list(range(STEPS))
        keys = [Coordinator.key(r) for step in range(STEPS) for r in survived[step].rollouts]
        assert len(set(keys)) == len(keys) == STEPS * R
        assert all(batch.staleness <= S for batch in survived.values())
        states = self.coordinator.states
        assert {key for key, state in states.items() if state == "consumed"} == set(keys)
        assert {Coordinator.key(r) for r in self.coordinator.rollouts} == set(states)
        assert sorted(self.coordinator.metrics) == list(range(STEPS))
        assert self.coordinator.published[-1][1] == STEPS


async def until(condition, *, seconds=2000.0):
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - a test looks from outside, and virtual time costs nothing
            await trio.sleep(0.25)


async def settled(service):
    await until(lambda: service.status().state == "finished" and not service.status().unreported)


async def test_a_run_from_the_first_step_to_the_last(autojump_clock):
    """Six steps of two groups; snapshots 0, 2, 4, 6, each published after its checkpoint; then it goes on serving."""
    world = World()
    async with world.pool(), world.learner() as service:
        await settled(service)
        world.check_finished_run()
        assert world.coordinator.published == [(0, 0), (0, 2), (0, 4), (0, 6)]
        status = service.status()
        assert (status.version, status.steps, status.consumed, status.waiting_for) == (6, 6, STEPS * R, "")
        assert status.published_version == 6
        assert status.reward == 0.5
        assert status.train_seconds == pytest.approx(STEPS * TRAIN_SECONDS)
        assert len(world.store.snapshots()) == 2  # old ones do not fill the disk


async def test_a_fast_pool_leaves_no_bubble_and_a_slow_one_does(autojump_clock):
    """Idle time is what the loop waited for rollouts: none when they are always there, half when they take as long
    again as training."""
    fast = World(group_seconds=0.5)
    async with fast.pool(), fast.learner() as service:
        await settled(service)
        assert service.status().bubble < 0.01
        assert fast.coordinator.metrics[0].idle_seconds > 0.5  # the warm-up is reported, not counted
    slow = World(group_seconds=TRAIN_SECONDS)
    async with slow.pool(), slow.learner() as service:
        await settled(service)
        assert service.status().bubble == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("tenths", [3, 30, 105, 149, 151, 230, 305, 306, 345, 405, 520, 601, 640])
async def test_a_killed_learner_resumes_without_loss_or_double_use(autojump_clock, tenths):
    """Killed at any moment, it goes on from its checkpoint under a higher epoch; nothing is consumed twice, no terminal
    state changes, and the run ends whole."""
    world = World()
    async with world.pool():
        async with world.learner():
            await trio.sleep(tenths / 10)
        await trio.sleep(3)
        async with world.learner() as service:
            await settled(service)
            world.check_finished_run()
            assert service.status().epoch == (1 if (0, 0) in world.disk.checkpoints else 0)


@pytest.mark.parametrize("tenths", [30, 149, 230, 345, 520, 640])
async def test_every_step_is_in_the_metrics_file_once(autojump_clock, tmp_path, tenths):
    """Killed at any moment, with half a line left behind, and resumed: one line a step, those that stand."""
    world = World()
    world.metrics_path = tmp_path / "metrics.jsonl"
    async with world.pool():
        async with world.learner():
            await trio.sleep(tenths / 10)
        with world.metrics_path.open("ab") as file:
            file.write(b'{"step":99,"roll')
        async with world.learner() as service:
            await settled(service)
    lines = [json.loads(line) for line in world.metrics_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    survived = {batch.step: batch for batch in world.disk.trained}
    assert [line["staleness"] for line in lines] == [survived[step].staleness for step in range(STEPS)]


async def test_a_learner_killed_again_and_again_gets_there(autojump_clock):
    """Each life gets one checkpoint further; epochs rise and are never used twice."""
    world = World()
    async with world.pool():
        for _ in range(5):
            async with world.learner():
                await trio.sleep(25)
        async with world.learner() as service:
            await settled(service)
            world.check_finished_run()
            assert service.status().epoch == 5


async def test_the_coordinator_restarts(autojump_clock):
    """While it is away the learner waits, or trains on what it holds, and says so; then it says hello again."""
    world = World(group_seconds=0.5)
    async with world.learner() as service:
        await trio.sleep(60)
        assert "coordinator" in service.status().waiting_for
        async with world.pool():
            await until(lambda: service.status().version == 2)
        assert world.coordinator.hellos == 1
        await trio.sleep(60)
        assert "coordinator" in service.status().waiting_for
        assert service.status().version > 2
        async with world.pool():
            await settled(service)
            world.check_finished_run()
            assert world.coordinator.hellos == 2
            assert world.coordinator.published == [(0, 0), (0, 2), (0, 4), (0, 6)]


async def test_a_coordinator_that_will_not_take_a_snapshot_yet(autojump_clock):
    """Publishing is tried for ever with the reason shown; training and reporting go on meanwhile."""
    world = World(group_seconds=0.5)
    async with world.pool(), world.learner() as service:
        await until(lambda: world.coordinator.published)
        world.coordinator.refuse_publish = True
        await until(lambda: service.status().version == 4)
        assert "not now" in service.status().waiting_for
        assert world.coordinator.published == [(0, 0)]
        world.coordinator.refuse_publish = False
        await settled(service)
        assert world.coordinator.published[-1] == (0, 6)


async def test_a_full_disk_is_waited_out(autojump_clock):
    """A checkpoint that cannot be written stops training, not the process; nothing is reported as consumed."""
    world = World()
    async with world.pool(), world.learner() as service:
        await until(lambda: service.status().version == 1)
        world.disk.broken = OSError(28, "No space left on device")
        await trio.sleep(100)
        assert service.status().version == 2
        assert "No space left" in service.status().waiting_for
        assert "No space left" in world.coordinator.reports[-1].status
        assert len(world.coordinator.reports) < 10
        assert world.consumed() == 0
        world.disk.broken = None
        await settled(service)
        await trio.sleep(10)
        assert "No space left" not in world.coordinator.reports[-1].status
        world.check_finished_run()


async def test_a_paused_run_is_not_idling(autojump_clock):
    """During a pause what is here is trained on; then the learner waits, says for whom, and that is no bubble."""
    world = World(group_seconds=0.5)
    async with world.pool(), world.learner() as service:
        await until(lambda: service.status().version == 1)
        world.coordinator.run_state = "paused"
        await trio.sleep(500)
        assert service.status().waiting_for.startswith("the operator, who paused the run; rollouts: 0 of 2")
        assert 1 < service.status().version < STEPS
        world.coordinator.run_state = "running"
        await settled(service)
        assert service.status().bubble < 0.35  # up to FETCH_SECONDS of the pause's end is seen as waiting


async def test_a_finished_run_may_be_restarted(autojump_clock):
    """A learner started again after the end has nothing to train or publish, says it is finished, and serves."""
    world = World(group_seconds=0.5)
    async with world.pool():
        async with world.learner() as service:
            await settled(service)
        world.coordinator.run_state = "finished"
        async with world.learner() as service:
            await settled(service)
            status = service.status()
            assert (status.version, status.epoch, status.waiting_for) == (STEPS, 1, "")
            assert world.coordinator.published[-1] == (0, STEPS)
        world.check_finished_run()


async def test_a_stopped_run_keeps_what_was_trained(autojump_clock):
    """When the operator ends the run early, the last steps are made durable and reported, the rest becomes stale."""
    world = World(group_seconds=0.5)
    async with world.pool(), world.learner() as service:
        await until(lambda: service.status().version == 3)
        world.coordinator.run_state = "stopped"
        await until(lambda: service.status().state == "stopped" and not service.status().unreported)
        version = service.status().version
        assert version < STEPS
        assert max(world.disk.checkpoints) == (0, version)
        assert world.consumed() == version * R
        await until(lambda: len(world.coordinator.states) == len(world.coordinator.rollouts))


async def test_withdrawn_rollouts_are_not_trained_on(autojump_clock):
    """A suspended node's rollouts leave the buffer, and their slots are filled by others."""
    world = World()
    async with world.coordinator.on(world.network), world.learner() as service:
        await until(lambda: world.coordinator.manifests)
        bad = [world.coordinator.admit(0, sample, version=0) for sample in range(2)]
        for sample in range(2, N):
            world.coordinator.admit(0, sample, version=0)
        await until(lambda: service.status().held == N)
        world.coordinator.withdraw = [Coordinator.key(r) for r in bad]
        world.coordinator.wake()
        await until(lambda: not world.coordinator.withdraw)
        assert service.status().held == N - 2
        for ordinal, sample in [(0, 0), (0, 1), *((1, sample) for sample in range(N))]:
            world.coordinator.admit(ordinal, sample, version=0)
        await until(lambda: service.status().version == 1)
        trained = {Coordinator.key(r) for r in world.disk.trained[0].rollouts}
        assert not trained & {Coordinator.key(r) for r in bad}
        assert [world.coordinator.states[Coordinator.key(r)] for r in bad] == ["withdrawn"] * 2


async def test_a_straggler_does_not_wedge_the_run(autojump_clock):
    """A sample that never comes holds its group back for the bound and no longer; when it comes at last it is late."""
    world = World()
    async with world.coordinator.on(world.network), world.learner(partial_seconds=60.0) as service:
        await until(lambda: world.coordinator.manifests)
        for ordinal, sample in [(0, 0), (0, 1), (0, 3), *((1, sample) for sample in range(N))]:
            world.coordinator.admit(ordinal, sample, version=0)
        await trio.sleep(50)
        assert service.status().waiting_for == "rollouts: 1 of 2 groups ready, 1 partial"
        await until(lambda: service.status().version == 1, seconds=30)
        late = world.coordinator.admit(0, 2, version=0)
        await until(lambda: Coordinator.key(late) in world.coordinator.states)
        assert world.coordinator.states[Coordinator.key(late)] == "stale"
        assert service.status().dropped == {"late, up to 2 tokens": 1}


async def test_an_unusable_rollout_costs_itself_only(autojump_clock):
    """A token id outside the vocabulary would end the process in the embedding; it is refused with its reason."""
    world = World()
    async with world.coordinator.on(world.network), world.learner() as service:
        await until(lambda: world.coordinator.manifests)
        bad = world.coordinator.admit(0, 0, version=0, tokens=(99, 2))
        await until(lambda: Coordinator.key(bad) in world.coordinator.states)
        assert service.status().held == 0
        assert "vocabulary" in world.coordinator.reports[-1].finished[0].reason


async def test_another_runs_home_or_another_learners_run_is_refused_in_one_line(autojump_clock):
    """Mistakes of the person who starts the process end it, in words."""
    world = World()
    async with world.pool():
        world.coordinator.learner = NODE.peer_id
        with pytest.raises(ExceptionGroup) as caught:
            async with world.learner():
                await trio.sleep(10)
        assert caught.group_contains(ConfigurationError, match="the run's learner is")
        world.coordinator.learner = LEARNER.peer_id
        world.card = ModelCard(
            name="other",
            architecture="llama",
            tokenizer_sha256="00" * 32,
            vocabulary_size=15,
            context_tokens=32,
            stop_ids=(2,),
        )
        with pytest.raises(ExceptionGroup) as caught:
            async with world.learner():
                await trio.sleep(10)
        assert caught.group_contains(ConfigurationError, match="tokenizer")


async def test_adapters_are_published_on_version_0_which_is_kept(autojump_clock):
    """One whole snapshot; every later manifest names it, and it outlives the clearing of old ones and a restart."""
    world = World()
    adapter = AdapterSettings()
    async with world.pool():
        async with world.learner(adapter=adapter) as service:
            await until(lambda: service.status().published_version == 4)
        async with world.learner(adapter=adapter) as service:
            await settled(service)
        world.check_finished_run()
    whole, *adapters = world.coordinator.manifests
    assert (whole.kind, whole.version) == ("full", 0)
    assert [manifest.kind for manifest in adapters] == ["adapter"] * len(adapters)
    assert len(adapters) >= 3
    held = world.store.snapshots()
    assert [snapshot.manifest.kind for snapshot in held] == ["full", "adapter", "adapter"]
    assert {manifest.base_hash for manifest in adapters} == {held[0].manifest_hash}


async def test_without_version_0_everything_is_published_whole(autojump_clock):
    """The snapshot folder was lost: nodes get larger files, and the run goes on."""
    world = World()
    adapter = AdapterSettings()
    async with world.pool():
        async with world.learner(adapter=adapter) as service:
            await until(lambda: service.status().published_version == 2)
        for snapshot in world.store.snapshots():
            await world.store.discard(snapshot.manifest_hash)
        async with world.learner(adapter=adapter) as service:
            await settled(service)
        world.check_finished_run()
    kinds = [(manifest.epoch, manifest.kind) for manifest in world.coordinator.manifests]
    assert kinds[:2] == [(0, "full"), (0, "adapter")]
    assert {kind for epoch, kind in kinds if epoch == 1} == {"full"}
