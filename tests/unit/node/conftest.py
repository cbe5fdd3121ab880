"""A pool to put one node into: a coordinator that does what the test says, a learner that serves snapshots."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from echo2.node.commands import MemoryCommands
from echo2.node.config import NodeSettings
from echo2.node.fake_engine import FakeEngine
from echo2.node.service import NodeService
from echo2.node.spool import Spool
from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.channel import answering
from echo2.p2p.codec import pack_tokens
from echo2.p2p.errors import Refused
from echo2.p2p.identity import Identity, open_signed
from echo2.p2p.join import JoinString
from echo2.p2p.manifest import make_manifest
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.memory_store import MemoryStore
from echo2.p2p.messages import (
    WIRE_VERSION,
    Heartbeat,
    HeartbeatBody,
    HeartbeatReply,
    Hello,
    Lease,
    LeaseReply,
    LeaseRequest,
    ManifestReply,
    ManifestRequest,
    PeerAddress,
    PoolNotice,
    Receipt,
    ReceiptBatch,
    ReceiptsReply,
    ReceiptsRequest,
    RunDescriptor,
    Sampling,
    SliceAck,
    SubmitReply,
    SubmitRequest,
    Ticket,
    Welcome,
)
from echo2.p2p.plan import build_plan

COORDINATOR, LEARNER, NODE = (Identity(bytes([i]) * 32) for i in (1, 2, 3))
RUN = "demo"
HEARTBEAT_SECONDS = 10.0


class Pool:
    """Scripted: attributes say how it answers, lists say what it was asked."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(random.Random(0), delay_seconds=0.01)
        self.join = JoinString(COORDINATOR.peer_id, (f"/memory/{COORDINATOR.peer_id}",), "token", RUN)
        self.run = RUN
        self.handed_in: dict[str, int] = {}
        self.learner_store = MemoryStore()
        self.published = None  # (signed manifest, manifest, hash)
        self.every: dict[bytes, tuple] = {}
        self.base_instead: bytes | None = None
        self.notice_changes: dict[str, object] = {}
        self.notice_signer = COORDINATOR
        self.hello_refusal: Refused | None = None
        self.work = 0  # slices still to be leased
        self.lease_seconds = 60.0
        self.tokens_max = 6
        self.hellos: list[Hello] = []
        self.beats: list[tuple[float, HeartbeatBody]] = []
        self.asked: list[LeaseRequest] = []
        self.leased: dict[bytes, Lease] = {}
        self.received: list = []
        self.receipts: list[Receipt] = []
        self.receipts_elsewhere: list[Receipt] = []
        self.manifests_asked = 0
        self.news = trio.Event()
        self.identity = NODE
        self.usual: dict[str, object] = {}
        self.instead: dict[str, object] = {}
        # what outlives the node's process
        self.store, self.spool, self.commands = MemoryStore(), Spool(":memory:"), MemoryCommands()
        self.engine = FakeEngine()
        self.papers = None

    # the learner's and coordinator's side

    async def publish(
        self,
        version: int,
        *,
        epoch: int = 0,
        data: bytes | None = None,
        base: bytes | None = None,
        created_seconds: float = 0.0,
    ) -> bytes:
        """A new snapshot, told at once to whoever holds a heartbeat open; with `base`, an adapter on that one."""
        path = Path(f"export-{epoch}-{version}")
        self.learner_store.files[path] = data or bytes([version]) * 100_000
        manifest = make_manifest(
            await self.learner_store.measure(path),
            run=self.run,
            publisher=LEARNER.peer_id,
            epoch=epoch,
            version=version,
            domain="f32",
            previous_hash=None,
            created_seconds=created_seconds,
            base_hash=base,
        )
        signed = LEARNER.sign("manifest", manifest)
        snapshot = await self.learner_store.adopt(signed, manifest, path)
        self.published = (signed, manifest, snapshot.manifest_hash)
        self.every[snapshot.manifest_hash] = self.published
        self.news.set()
        self.news = trio.Event()
        return snapshot.manifest_hash

    async def _coordinate(self, task_status=trio.TASK_STATUS_IGNORED):
        async with self.network.transport(COORDINATOR) as transport:
            for protocol, kind, answer in (
                ("hello", Hello, self._hello),
                ("heartbeat", Heartbeat, self._heartbeat),
                ("manifest", ManifestRequest, self._manifest),
                ("leases", LeaseRequest, self._lease),
                ("rollouts", SubmitRequest, self._submit),
                ("receipts", ReceiptsRequest, self._receipts),
            ):
                self.usual[protocol] = answer
                transport.set_handler(
                    protocol, answering(kind, self._answer(protocol, answer), lambda *_: None, wait_seconds=60)
                )
            with trio.CancelScope() as self._coordinator_scope:
                task_status.started()
                await trio.sleep_forever()

    def _answer(self, protocol, usual):
        async def answer(peer, message):
            return await self.instead.get(protocol, usual)(peer, message)

        return answer

    async def start_coordinator(self):
        await self._nursery.start(self._coordinate)

    async def kill_coordinator(self):
        self.network.kill(COORDINATOR.peer_id)
        self._coordinator_scope.cancel()
        await trio.sleep(0.01)

    @asynccontextmanager
    async def running(self):
        """Coordinator and learner are up."""
        async with self.network.transport(LEARNER) as transport, trio.open_nursery() as self._nursery:
            Broadcaster(
                transport,
                self.learner_store,
                COORDINATOR.peer_id,
                clock=trio.current_time,
                complain=lambda *_: None,
            ).serve()
            await self.start_coordinator()
            yield self
            self._nursery.cancel_scope.cancel()

    # the node's side

    def service(self, transport, nat=None, **config) -> NodeService:
        return NodeService(
            config=NodeSettings(**({"name": "n1"} | config)),
            identity=NODE,
            transport=transport,
            join=self.join,
            engine=self.engine,
            store=self.store,
            spool=self.spool,
            papers=self.papers,
            clock=trio.current_time,
            rng=random.Random(7),
            commands=self.commands,
            nat=nat,
        )

    @asynccontextmanager
    async def node(self, **config):
        """A running node process; leaving the context is its `kill -9`."""
        async with self.network.transport(NODE) as transport, trio.open_nursery() as nursery:
            service = self.service(transport, **config)
            nursery.start_soon(service.run)
            yield service
            nursery.cancel_scope.cancel()

    # answers

    async def _hello(self, peer, hello):
        self.hellos.append(hello)
        if self.hello_refusal:
            raise self.hello_refusal
        descriptor = RunDescriptor(
            run=self.run,
            task="arithmetic",
            model="tiny",
            tokenizer_sha256=bytes(32),
            vocabulary_size=15,
            context_tokens=64,
            learner=PeerAddress(peer=LEARNER.peer_id, addresses=(f"/memory/{LEARNER.peer_id}",)),
            staleness_max=3,
            publish_period=2,
            rollouts_per_step=16,
            group_size=4,
            steps=10,
            sampling=self._sampling(),
        )
        return Welcome(
            wire_version=WIRE_VERSION,
            node_state="active",
            coordinator_time_seconds=0.0,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            descriptor=COORDINATOR.sign("run", descriptor),
        )

    def _sampling(self) -> Sampling:
        return Sampling(temperature=1.0, tokens_max=self.tokens_max, stop_ids=(2,))

    async def _heartbeat(self, peer, heartbeat):
        body = open_signed(heartbeat.body, peer, "heartbeat", HeartbeatBody)
        if body.run != self.run:
            raise Refused("moved", f"you are in the run {self.run} now; say hello", 0.0)
        self.beats.append((trio.current_time(), body))
        with trio.move_on_after(body.hold_seconds):
            while (self.published[2] if self.published else None) == body.manifest_hash:
                await self.news.wait()
                if body.run != self.run:
                    raise Refused("moved", f"you are in the run {self.run} now; say hello", 0.0)
        if self.published and self.published[2] != body.manifest_hash and len(self.beats) > 1:
            await trio.sleep(0.5)
        _, manifest, manifest_hash = self.published or (None, None, None)
        fields = {
            "run": body.run,
            "run_state": "running",
            "peer": peer,
            "session": body.session,
            "sequence": body.sequence,
            "epoch": manifest.epoch if manifest else 0,
            "version": manifest.version if manifest else None,
            "manifest_hash": manifest_hash,
            "node_state": "active",
            "coordinator_time_seconds": 0.0,
        } | self.notice_changes
        return HeartbeatReply(notice=self.notice_signer.sign("notice", PoolNotice(**fields)))

    async def _manifest(self, peer, request):
        self.manifests_asked += 1
        signed, manifest, manifest_hash = self.published
        if request.manifest_hash == manifest.base_hash:
            signed, manifest, manifest_hash = self.every[self.base_instead or request.manifest_hash]
        plan = build_plan(
            "star",
            manifest=manifest,
            manifest_hash=manifest_hash,
            root=PeerAddress(peer=LEARNER.peer_id, addresses=(f"/memory/{LEARNER.peer_id}",)),
            nodes=[PeerAddress(peer=peer)],
        )
        ticket = Ticket(run=self.run, manifest_hash=manifest_hash, peer=peer)
        return ManifestReply(
            manifest=signed, plan=COORDINATOR.sign("plan", plan), ticket=COORDINATOR.sign("ticket", ticket)
        )

    async def _lease(self, peer, request):
        self.asked.append(request)
        count = min(self.work, max(request.samples_max // 2, 1), 64)
        if not count:
            return LeaseReply(leases=(), retry_seconds=1.0, reason="paced: version 0 has its share")
        self.work -= count
        leases = tuple(
            Lease(
                lease_id=len(self.leased).to_bytes(8, "big") + bytes([i]) * 8,
                kind="train",
                ordinal=len(self.leased) + i,
                sample_first=0,
                sample_count=2,
                seed=bytes([i]) * 32,
                manifest_hash=request.manifest_hash,
                version=self.published[1].version,
                prompt_tokens=pack_tokens([5, 6]),
                sampling=self._sampling(),
                duration_seconds=self.lease_seconds,
            )
            for i in range(count)
        )
        self.leased.update({lease.lease_id: lease for lease in leases})
        return LeaseReply(leases=leases, retry_seconds=0.0, reason="")

    async def _submit(self, peer, request):
        for piece in request.slices:
            self.received.append(piece)
            self.handed_in[request.run] = self.handed_in.get(request.run, 0) + 1
            receipts = self.receipts if request.run == RUN else self.receipts_elsewhere
            for rollout in piece.rollouts:
                receipts.append(
                    Receipt(
                        sequence=len(receipts) + 1,
                        lease_id=piece.lease_id,
                        sample=rollout.sample,
                        state="consumed",
                        reason="",
                        reward=1.0,
                    )
                )
        acks = tuple(SliceAck(lease_id=piece.lease_id, state="held", reason="") for piece in request.slices)
        return SubmitReply(acks=acks)

    async def _receipts(self, peer, request):
        known = self.receipts if request.run == RUN else self.receipts_elsewhere
        rest = [receipt for receipt in known if receipt.sequence > request.after_sequence]
        batch = ReceiptBatch(run=request.run, peer=peer, receipts=tuple(rest[:5]))
        return ReceiptsReply(batch=COORDINATOR.sign("receipts", batch), more=len(rest) > 5)


@pytest.fixture
async def pool():
    pool = Pool()
    async with pool.running():
        yield pool
