"""A coordinator on a network in memory, under a virtual clock, with peers that do as the test says."""

from __future__ import annotations

import hashlib
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from echo2.coordinator.config import CoordinatorConfig
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.service import CoordinatorService
from echo2.p2p.channel import request
from echo2.p2p.chunks import hash_bytes
from echo2.p2p.codec import pack_logprobs, pack_tokens, unpack_tokens
from echo2.p2p.identity import Identity, open_signed
from echo2.p2p.manifest import make_manifest
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import (
    Ack,
    AdmittedReply,
    AdmittedRequest,
    BroadcastPlan,
    Finished,
    Heartbeat,
    HeartbeatBody,
    HeartbeatReply,
    Hello,
    LearnerReport,
    LeaseReply,
    LeaseRequest,
    ManifestReply,
    ManifestRequest,
    PeerAddress,
    PoolNotice,
    PublishReply,
    PublishRequest,
    ReceiptBatch,
    ReceiptsReply,
    ReceiptsRequest,
    RolloutRecord,
    Slice,
    StepMetrics,
    SubmitReply,
    SubmitRequest,
    Welcome,
)
from echo2.tasks.model_card import ModelCard
from echo2.tasks.scorer import InlineScorer
from echo2.tasks.task import Prompt, Score

STOP = 14
WALL = 1_700_000_000.0


def identity(number):
    return Identity(number.to_bytes(32))


class CountingTask:
    """Prompt i asks for the digit i % 10; the right answer scores 1."""

    name = "counting"

    def __init__(self, train_size=50, heldout_size=4):
        self.train_size = train_size
        self.heldout_size = heldout_size

    def prompt(self, split, index):
        return Prompt(split, index, str(index % 10))

    def score(self, prompt, response):
        return Score(float(response == prompt.text))


class DigitText:
    """Digits are their own token ids."""

    card = ModelCard(
        name="digits",
        architecture="llama",
        tokenizer_sha256="0" * 64,
        vocabulary_size=15,
        context_tokens=16,
        stop_ids=(STOP,),
    )

    def encode(self, text):
        return [int(digit) for digit in text]

    def decode(self, tokens):
        return ["".join(str(token) for token in response if token < 10) for response in tokens]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What a quicker test does to the tables too runs on PostgreSQL in `make test-all` only."""
    for item in items:
        if item.get_closest_marker("slow_on_postgresql") and "[postgresql" in item.name:
            item.add_marker(pytest.mark.slow)


@dataclass
class World:
    """The network, the coordinator's files, and whatever peers the test brings."""

    path: object
    network: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(random.Random(1), delay_seconds=0.01))
    task: CountingTask = field(default_factory=CountingTask)
    text: object = field(default_factory=DigitText)
    rng: random.Random = field(default_factory=lambda: random.Random(2))
    wall_offset: float = WALL
    scorer: object = None
    run_settings: dict = field(default_factory=dict)
    activation: dict = field(default_factory=dict)
    credit: dict = field(default_factory=dict)
    admission: dict = field(default_factory=lambda: {"warmup_leases": 0})
    proved: object = None
    service: CoordinatorService = None
    database_url: str = ""
    coordinator = identity(1)
    learner_identity = identity(2)

    @property
    def url(self):
        return self.database_url or f"sqlite:///{self.path}"

    def config(self):
        run = {
            "name": "r1",
            "task": self.task.name,
            "model_dir": "m",
            "learner": self.learner_identity.peer_id,
            "steps": 4,
            "S": 2,
            "kappa": 1,
            "R": 8,
            "n": 4,
            "tokens_max": 4,
            "slice_samples_max": 2,
            "lease_seconds": 60.0,
        }
        return CoordinatorConfig(
            heartbeat_seconds=10.0,
            run=run | self.run_settings,
            activation=self.activation,
            credit=self.credit,
            admission=self.admission,
        )

    @asynccontextmanager
    async def serving(self):
        """A coordinator process from start to kill: what is not in the ledger is gone afterwards."""
        # PostgreSQL's own housekeeping locks tables for a moment, and longer on a busy machine.
        busy_seconds = 0.01 if self.url.startswith("sqlite") else 2.0
        ledger = open_ledger(self.url, busy_seconds=busy_seconds, exclusive=True, clock=trio.current_time)
        body_error = None
        async with self.network.transport(self.coordinator) as transport, trio.open_nursery() as nursery:
            self.service = self.make(ledger, transport)
            nursery.start_soon(self.service.run)
            await trio.testing.wait_all_tasks_blocked()
            try:
                yield self.service
            except Exception as error:  # noqa: BLE001 - raised again outside, lest the nursery wrap it in a group
                body_error = error
            nursery.cancel_scope.cancel()
        ledger.close()
        if body_error is not None:
            raise body_error

    def make(self, ledger, transport):
        return CoordinatorService(
            config=self.config(),
            identity=self.coordinator,
            transport=transport,
            ledger=ledger,
            scorer=self.scorer or InlineScorer({self.task.name: self.task}),
            clock=trio.current_time,
            wall=lambda: self.wall_offset + trio.current_time(),
            entropy=self.rng.randbytes,
            task=self.task,
            text=self.text,
            proved=self.proved,
        )

    def token(self, uses=100, expires_seconds=None):
        return self.service.create_token(uses=uses, expires_seconds=expires_seconds, actor="test", reason="test")

    @property
    def run(self):
        return self.service.run_view("r1")

    @asynccontextmanager
    async def peer(self, number, kind):
        async with self.network.transport(identity(number)) as transport:
            yield kind(self, identity(number), transport)

    def node(self, number):
        return self.peer(number, Node)

    @asynccontextmanager
    async def node_at(self, number, host):
        """A node that comes from this IP address."""
        async with self.network.transport(identity(number), host=host) as transport:
            yield Node(self, identity(number), transport)

    def learner(self, number=2):
        return self.peer(number, Learner)


class Peer:
    def __init__(self, world, who, transport):
        self.world, self.identity, self.transport = world, who, transport
        self.peer_id = who.peer_id

    async def ask(self, protocol, message, reply, wait=0.0):
        addresses = self.world.network._transports[self.world.coordinator.peer_id].addresses
        coordinator = PeerAddress(peer=self.world.coordinator.peer_id, addresses=addresses)
        return await request(self.transport, coordinator, protocol, message, reply, wait_seconds=wait)


class Node(Peer):
    run, wanted = "r1", None

    def __init__(self, *args):
        super().__init__(*args)
        self.session = self.identity.seed[:16][::-1]
        self.sequence = 0
        self.installed = None
        self.price = 0
        self.relayed = ()

    async def hello(self, token="", versions=(1,), session=None, home=None):
        message = Hello(
            wire_versions=versions,
            software="test",
            role="node",
            name="volunteer",
            token=token,
            addresses=self.transport.addresses,
            price_micros_hour=self.price,
            session=session,
            home=home,
            run=self.wanted,
        )
        return await self.ask("hello", message, Welcome)

    async def heartbeat(
        self, hold=0.0, manifest=None, held=0, sequence=None, session=None, state="working", late=(), fetching=None
    ):
        self.sequence += 1
        manifest = manifest or self.installed
        body = HeartbeatBody(
            run=self.run,
            session=session or self.session,
            sequence=self.sequence if sequence is None else sequence,
            epoch=0,
            version=0 if manifest else None,
            manifest_hash=manifest,
            state=state,
            leases_held=held,
            rollouts_generated=0,
            rollouts_spooled=0,
            tokens_per_second=10.0,
            hold_seconds=hold,
            late=tuple(late),
            relayed=tuple(self.relayed),
            fetching=fetching,
        )
        reply = await self.ask("heartbeat", Heartbeat(body=self.identity.sign("heartbeat", body)), HeartbeatReply, hold)
        return open_signed(reply.notice, self.world.coordinator.peer_id, "notice", PoolNotice)

    async def join(self, hello=True, held=0):
        """Hello, then install what the pool runs, in no time."""
        if hello:
            await self.hello(self.world.token())
        notice = await self.heartbeat(held=held)
        self.installed = notice.manifest_hash
        if self.installed:
            await self.heartbeat(held=held)
        return notice

    async def manifest(self, manifest_hash):
        reply = await self.ask("manifest", ManifestRequest(run=self.run, manifest_hash=manifest_hash), ManifestReply)
        return open_signed(reply.plan, self.world.coordinator.peer_id, "plan", BroadcastPlan), reply

    async def lease(self, samples=100, wait=0.0):
        message = LeaseRequest(run=self.run, manifest_hash=self.installed, samples_max=samples, wait_seconds=wait)
        return await self.ask("leases", message, LeaseReply, wait)

    async def submit(self, *slices):
        return (await self.ask("rollouts", SubmitRequest(run=self.run, slices=slices), SubmitReply)).acks

    async def receipts(self, after=0):
        reply = await self.ask("receipts", ReceiptsRequest(run=self.run, after_sequence=after), ReceiptsReply)
        return open_signed(reply.batch, self.world.coordinator.peer_id, "receipts", ReceiptBatch).receipts

    async def work(self, samples=100, wait=0.0):
        """One round: lease, answer rightly, submit. The leases."""
        leases = (await self.lease(samples, wait)).leases
        if leases:
            await self.submit(*map(answer, leases))
        return leases


class Learner(Peer):
    run = "r1"

    def __init__(self, *args):
        super().__init__(*args)
        self.after = 0
        self.version = 0
        self.epoch = 0
        self.consumed = []

    async def hello(self):
        message = Hello(
            wire_versions=(1,), software="test", role="learner", name="learner", addresses=self.transport.addresses
        )
        return await self.ask("hello", message, Welcome)

    def manifest(self, epoch=0, version=0):
        content = hash_bytes(f"snapshot {version} of epoch {epoch}".encode() * 100)
        return self.identity.sign(
            "manifest",
            make_manifest(
                content,
                run=self.run,
                publisher=self.peer_id,
                epoch=epoch,
                version=version,
                domain="f32",
                previous_hash=None,
                created_seconds=WALL,
            ),
        )

    async def publish(self, epoch=0, version=0):
        signed = self.manifest(epoch, version)
        reply = await self.ask("publish", PublishRequest(manifest=signed), PublishReply)
        plan = open_signed(reply.plan, self.world.coordinator.peer_id, "plan", BroadcastPlan)
        return hashlib.sha256(signed.payload).digest(), plan

    async def fetch(self, wait=0.0, after=None, most=4096):
        message = AdmittedRequest(
            run=self.run, after_sequence=self.after if after is None else after, rollouts_max=most, wait_seconds=wait
        )
        reply = await self.ask("admitted", message, AdmittedReply, wait)
        self.after = max([self.after, *(rollout.sequence for rollout in reply.rollouts)])
        return reply

    async def report(self, finished=(), steps=(), status="training"):
        message = LearnerReport(
            run=self.run,
            epoch=self.epoch,
            version=self.version,
            finished=tuple(finished),
            steps=tuple(steps),
            status=status,
        )
        return await self.ask("report", message, Ack)

    async def train(self, rollouts):
        """One step over these rollouts, reported."""
        step = self.version
        self.version += 1
        await self.report([done(rollout, step=step) for rollout in rollouts], [metrics(step, len(rollouts))])


def answer(lease, digits=None, finish="stop"):
    """The slice of a lease: each sample repeats the prompt (right) or says `digits`."""
    prompt = unpack_tokens(lease.prompt_tokens).tolist()
    tokens = [*(prompt if digits is None else digits), STOP]
    samples = range(lease.sample_first, lease.sample_first + lease.sample_count)
    rollouts = tuple(
        RolloutRecord(
            sample=sample, tokens=pack_tokens(tokens), logprobs=pack_logprobs([-0.5] * len(tokens)), finish=finish
        )
        for sample in samples
    )
    return Slice(lease_id=lease.lease_id, manifest_hash=lease.manifest_hash, rollouts=rollouts)


def done(rollout, state="consumed", step=0, reason=""):
    return Finished(lease_id=rollout.lease_id, sample=rollout.sample, state=state, step=step, reason=reason)


def metrics(step, rollouts, train_seconds=2.0, idle_seconds=1.0):
    return StepMetrics(
        step=step,
        rollouts=rollouts,
        groups=rollouts // 4,
        groups_without_spread=0,
        staleness=1,
        staleness_mean=0.5,
        reward_mean=0.5,
        loss=0.1,
        ratio_mean=1.0,
        clip_share=0.0,
        kl_sampler_learner=0.001,
        entropy=0.5,
        response_tokens_mean=3.0,
        gradient_norm=1.0,
        train_seconds=train_seconds,
        idle_seconds=idle_seconds,
    )


class Tools:
    """What a test builds its messages with."""

    answer = staticmethod(answer)
    done = staticmethod(done)
    metrics = staticmethod(metrics)
    identity = staticmethod(identity)
    world = World
    stop = STOP
    wall = WALL


@pytest.fixture
def tools():
    return Tools


@pytest.fixture
def world(tmp_path, database_url):
    return World(tmp_path / "ledger.sqlite3", database_url=database_url)
