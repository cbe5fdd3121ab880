"""One coordinator with several runs, their learners, and nodes that go where they are told, under a virtual clock."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
import trio

from echo2.coordinator import schema
from echo2.coordinator.config import AdmissionConfig, CoordinatorConfig, RunConfig
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.service import CoordinatorService
from echo2.coordinator.simulated_model import SimulatedTask, simulated_text
from echo2.learner.config import LearnerConfig
from echo2.learner.fake_trainer import FakeDisk, FakeTrainer
from echo2.learner.service import LearnerService
from echo2.node.config import NodeSettings
from echo2.node.fake_engine import FakeEngine, seeded_tokens
from echo2.node.papers import Papers
from echo2.node.service import NodeService
from echo2.node.spool import Spool
from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.codec import decode_record
from echo2.p2p.identity import Identity
from echo2.p2p.join import JoinString
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.memory_store import MemoryStore
from echo2.p2p.messages import PeerAddress, ReceiptBatch
from echo2.tasks.scorer import InlineScorer

WALL = 1_800_000_000.0


@dataclass
class Run:
    """A run's numbers, and what is on its learner's disk."""

    name: str
    weight: float
    steps: int
    train_seconds: float = 2.0
    starts_seconds: float = 0.0
    disk: FakeDisk = field(default_factory=FakeDisk)
    store: MemoryStore = field(default_factory=MemoryStore)


class RunsWorld:
    """`play` returns when every run is over and each node has a receipt for all it delivered."""

    def __init__(self, runs, nodes=9, seed=1, restart_at=None, patience_seconds=3600.0):
        self.runs = {run.name: run for run in runs}
        self.nodes = [f"node-{index}" for index in range(nodes)]
        self.restart_at = restart_at
        self.patience_seconds = patience_seconds
        rng = self.rng = random.Random(seed)
        self.network = MemoryNetwork(random.Random(seed + 1), delay_seconds=0.03, loss=0.0, bytes_per_second=1e6)
        self.keys = {name: Identity(rng.randbytes(32)) for name in ["coordinator", *self.runs, *self.nodes]}
        self.ledger = open_ledger("sqlite://")
        self.task = SimulatedTask(8)
        self.spools = {name: Spool(":memory:") for name in self.nodes}
        self.service = None
        self.token = ""
        self.seen = []
        """(seconds, live nodes by run), once a second."""

    def config(self):
        runs = tuple(
            RunConfig(
                name=run.name, task="simulated", model_dir=Path("m"), learner=self.keys[run.name].peer_id,
                steps=run.steps, weight=run.weight, S=3, kappa=2, R=8, n=4, tokens_max=6, lease_seconds=15.0,
            )
            for run in self.runs.values()
        )  # fmt: skip
        return CoordinatorConfig(heartbeat_seconds=2.0, runs=runs, admission=AdmissionConfig())

    async def play(self):
        with trio.fail_after(self.patience_seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.coordinator)
                for run in self.runs.values():
                    nursery.start_soon(self.learner, run)
                for name in self.nodes:
                    nursery.start_soon(self.node, name)
                await self.until_over()
                nursery.cancel_scope.cancel()

    async def until_over(self):
        while True:
            await trio.sleep(1.0)
            if self.service is None:
                continue
            views = self.service.runs_view()
            self.seen.append((trio.current_time(), {view.run: view.nodes for view in views}))
            counts = [spool.counts() for spool in self.spools.values()]
            owed = sum(each.spooled + each.undecided for each in counts)
            if all(view.state == "finished" for view in views) and not owed:
                return

    async def coordinator(self):
        while True:
            with trio.move_on_at(self.restart_at or float("inf")):
                await self.serve()
            self.service, self.restart_at = None, None
            self.network.kill(self.keys["coordinator"].peer_id)
            await trio.sleep(3.0)

    async def serve(self):
        async with self.network.transport(self.keys["coordinator"]) as transport:
            service = CoordinatorService(
                config=self.config(), identity=self.keys["coordinator"], transport=transport, ledger=self.ledger,
                scorer=InlineScorer({"simulated": self.task}), clock=trio.current_time,
                wall=lambda: WALL + trio.current_time(), entropy=self.rng.randbytes, task=self.task,
                text=simulated_text(),
            )  # fmt: skip
            self.token = self.token or service.create_token(
                uses=len(self.nodes), expires_seconds=None, actor="test", reason="nodes"
            )
            self.service = service
            await service.run()

    async def learner(self, run):
        def write(name, data):
            run.store.files[Path(name)] = data
            return Path(name)

        await trio.sleep(run.starts_seconds)
        key = self.keys["coordinator"].peer_id
        async with self.network.transport(self.keys[run.name]) as transport:
            await LearnerService(
                config=LearnerConfig(
                    home=Path("l"), model_dir=Path("m"), coordinator=f"/ip4/127.0.0.1/tcp/1/p2p/{key}", run=run.name
                ),
                identity=self.keys[run.name],
                transport=transport,
                coordinator=PeerAddress(peer=key, addresses=(f"/memory/{key}",)),
                run=run.name,
                trainer=FakeTrainer(disk=run.disk, write=write, train_seconds=run.train_seconds, snapshot_bytes=20_000),
                store=run.store,
                broadcaster=Broadcaster(transport, run.store, key, clock=trio.current_time, complain=lambda *_: None),
                clock=trio.current_time,
                wall=lambda: WALL + trio.current_time(),
            ).run()

    async def node(self, name):
        while not self.token:  # noqa: ASYNC110 - a coordinator makes it at its first start
            await trio.sleep(0.1)
        key = self.keys["coordinator"].peer_id
        async with self.network.transport(self.keys[name]) as transport:
            await NodeService(
                config=NodeSettings(name=name, receipts_seconds=3.0, statements_seconds=30.0, batch=8),
                identity=self.keys[name],
                transport=transport,
                join=JoinString(key, (f"/memory/{key}",), self.token, "*"),
                engine=FakeEngine(rollout_seconds=0.2, tokens=seeded_tokens),
                sandbox=InlineScorer(),
                home=name.encode().ljust(16)[:16],
                store=MemoryStore(),
                spool=self.spools[name],
                papers=Papers(":memory:"),
                clock=trio.current_time,
                rng=random.Random(self.rng.random()),
                show=lambda _status: None,
            ).run()

    # what the disks hold at the end

    def consumed_by_learner(self, run):
        newest = run.disk.checkpoints[max(run.disk.checkpoints)]
        return sum((stop - first) * mask.bit_count() for first, stop, mask in newest.consumed)

    def rollouts(self, run):
        """(lease, sample, state) of a run, by the ledger."""
        table = schema.rollouts
        with self.ledger.reading() as connection:
            rows = connection.execute(sa.select(table).where(table.c.run == run))
            return {(bytes(row.lease_id), row.sample): row.state for row in rows}

    def receipts(self, run):
        """(node, sequence, lease, sample, state) of a run, by the nodes' spools."""
        found = []
        for name, spool in self.spools.items():
            for signed in spool.receipt_batches(run):
                batch = decode_record(signed.payload, ReceiptBatch)
                found += [(name, one.sequence, one.lease_id, one.sample, one.state) for one in batch.receipts]
        return found
