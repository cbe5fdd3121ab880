"""The whole system under a virtual clock: the real coordinator, node and learner services, in one process.

Cut above libp2p: the memory transport carries the real frames; engine and trainer are fakes that cost `trio.sleep`;
what would be on a disk (ledger, spool, snapshots, checkpoints) outlives a simulated `kill -9` as a disk would. A crash
cancels the process at whatever it awaits and breaks its streams. Everything random comes from the scenario's seed.

This module alone imports all packages, and nothing imports it.
"""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa
import trio

from echo2.learner.config import AdapterSettings, LearnerConfig
from echo2.learner.fake_trainer import FakeDisk, FakeTrainer
from echo2.learner.service import LearnerService
from echo2.node.config import NodeSettings
from echo2.node.fake_engine import FakeEngine, seeded_tokens
from echo2.node.papers import Papers
from echo2.node.service import NodeService
from echo2.node.spool import Finished, Spool
from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.codec import decode_record
from echo2.p2p.errors import Echo2Error, Refused
from echo2.p2p.identity import Identity
from echo2.p2p.join import JoinString
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.memory_store import MemoryStore
from echo2.p2p.messages import PeerAddress, ReceiptBatch, SliceAck
from echo2.tasks.race import Race
from echo2.tasks.scorer import InlineScorer

from . import schema
from .config import ActivationConfig, AdmissionConfig, CoordinatorConfig, RunConfig
from .ledger import Ledger, open_ledger
from .service import CoordinatorService
from .simulated_model import SimulatedTask, race_turn, simulated_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from echo2.learner.interfaces import Batch, Progress
    from echo2.node.engine import SliceOrder
    from echo2.node.status import NodeStatus

RUN = "simulated"

WALL_START_SECONDS = 1_800_000_000.0
"""Unix time at virtual zero; only differences matter."""


@dataclass(frozen=True, slots=True)
class Crash:
    """`kill -9` of a process at a virtual time, and a restart after `down_seconds`."""

    process: str
    at_seconds: float
    down_seconds: float


@dataclass(frozen=True, slots=True)
class PutBack:
    """A copy of a process's disk, taken at one time, is put back at a later one: the process is killed and restarted.

    A copy taken at 0 s is an empty disk.
    """

    process: str
    copied_seconds: float
    at_seconds: float
    down_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated run. `loss` is the chance that a piece of a stream (about 16 KiB) is lost and breaks the stream."""

    seed: int
    nodes: int = 3
    steps: int = 8
    S: int = 3
    kappa: int = 2
    R: int = 16
    n: int = 4
    heldout: int = 8
    eval_every: int = 0
    eval_samples: int = 1
    eval_share: float = 0.1
    task: Literal["simulated", "race"] = "simulated"
    """`race`: episodes of several turns, played on the nodes and again at the coordinator."""
    train_seconds: float = 2.0
    rollout_seconds: float = 0.1
    delay_seconds: float = 0.03
    loss: float = 0.0
    bytes_per_second: float = 1e6
    snapshot_bytes: int = 200_000
    heartbeat_seconds: float = 2.0
    lease_seconds: float = 15.0
    partial_seconds: float = 60.0
    warmup_leases: int = 10
    suspension_seconds: float = 20.0
    """A run takes a minute or so: an hour would be for good."""
    adapters: bool = False
    """Whether version 0 is published whole and later ones as adapters on it."""
    prices: tuple[float, ...] = ()
    """Dollars an hour that the first nodes ask; the others are volunteers'."""
    budget: float = 0.0
    crashes: tuple[Crash, ...] = ()
    put_back: PutBack | None = None
    stop_seconds: float | None = None
    """When an operator stops the run, if that is before its end."""
    patience_seconds: float = 3600.0


def random_scenario(seed: int) -> Scenario:
    """A scenario with seeded crashes of every kind of process and, in half of the cases, lost messages."""
    rng = random.Random(seed)
    nodes = rng.randint(2, 5)
    processes = ["coordinator", "learner", *(f"node-{index}" for index in range(nodes))]
    kappa = rng.randint(1, 3)
    steps = rng.randint(6, 10)
    train_seconds = rng.uniform(0.5, 3.0)
    busy_seconds = 1.5 * steps * train_seconds  # about as long as a run without faults takes
    crashes = tuple(
        Crash(rng.choice(processes), rng.uniform(0.5, busy_seconds), rng.uniform(0.1, 8.0))
        for _ in range(rng.randint(2, 8))
    )
    return Scenario(
        seed=seed,
        nodes=nodes,
        steps=steps,
        kappa=kappa,
        S=kappa + rng.randint(0, 2),
        train_seconds=train_seconds,
        rollout_seconds=rng.uniform(0.02, 0.3),
        delay_seconds=rng.uniform(0.005, 0.2),
        loss=rng.choice([0.0, rng.uniform(0.001, 0.02)]),
        lease_seconds=rng.uniform(2.0, 15.0),
        partial_seconds=rng.uniform(5.0, 60.0),
        crashes=crashes,
    )


@dataclass(slots=True)
class Observed:
    """What happened, as the disks and the fakes saw it. `batches` and `resumes` are in order of time."""

    acknowledged: set[tuple[bytes, int]] = field(default_factory=set)
    forgotten: set[tuple[bytes, int]] = field(default_factory=set)
    """In the ledger, and unknown to the copy of it that was put back; or of a lease that is."""
    events: list[tuple[str, int, Batch | int]] = field(default_factory=list)
    """("step", epoch, batch) or ("resume", epoch, version)."""
    ledger: dict[tuple[bytes, int], str] = field(default_factory=dict)
    receipts: list[tuple[str, int, bytes, int, str]] = field(default_factory=list)
    run_state: str = ""
    version: int | None = None
    waiting: str = ""
    evaluations: dict[int, int] = field(default_factory=dict)
    """Held-out version -> answers scored."""
    evaluations_ended: dict[int, str] = field(default_factory=dict)
    """Held-out version -> why it ended before it was complete."""
    heldout: dict[int, list[float]] = field(default_factory=dict)
    """Rewards of the ledger's evaluated rollouts by the version they were leased under, in order of arrival."""
    means: dict[int, float | None] = field(default_factory=dict)
    """What the ledger says of each evaluation."""
    first_trained_seconds: float | None = None
    trained_seconds: float = 0.0
    """When the first and the last step were trained."""
    submitted_by_nodes: int = 0
    consumed_by_learner: int = 0
    """By its newest checkpoint."""
    installs: int = 0
    seconds: float = 0.0
    node_states: dict[str, str] = field(default_factory=dict)
    transitions: dict[str, list[str]] = field(default_factory=dict)
    """By node: what happened to it, as the ledger has it."""


class Simulation:
    """One world. `run` returns what was observed once the run is over and every node knows its receipts."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._rng = random.Random(scenario.seed)
        self._network = MemoryNetwork(
            random.Random(scenario.seed + 1),
            delay_seconds=scenario.delay_seconds,
            loss=scenario.loss,
            bytes_per_second=scenario.bytes_per_second,
        )
        self._identities = {name: Identity(self._rng.randbytes(32)) for name in self._names()}
        heldout = scenario.heldout
        self._task = SimulatedTask(heldout) if scenario.task == "simulated" else Race(heldout_size=heldout)
        self.ledger: Ledger = open_ledger("sqlite://")
        self._disk = FakeDisk()
        self._stores = {name: MemoryStore() for name in self._names()}
        self.observed = Observed()
        self._spools = {name: _WatchedSpool(self.observed) for name in self._node_names()}
        self.papers = {name: Papers(":memory:") for name in self._node_names()}
        self._scopes: dict[str, trio.CancelScope] = {}
        self._down_until: dict[str, float] = {}
        self._is_back = False
        self._token = ""
        self._token_made = trio.Event()
        self._service: CoordinatorService | None = None
        self._node_status: dict[str, NodeStatus] = {}

    def _node_names(self) -> list[str]:
        return [f"node-{index}" for index in range(self.scenario.nodes)]

    def _names(self) -> list[str]:
        return ["coordinator", "learner", *self._node_names()]

    async def run(self) -> Observed:
        """Play the scenario to its end. Raises trio.TooSlowError when it does not end within its patience."""
        mains: dict[str, Callable[[], Awaitable[None]]] = {"coordinator": self._coordinator, "learner": self._learner}
        with trio.fail_after(self.scenario.patience_seconds):
            async with trio.open_nursery() as nursery:
                for name in self._names():
                    nursery.start_soon(self._supervise, name, mains.get(name) or self._node_main(name))
                for crash in self.scenario.crashes:
                    nursery.start_soon(self._crash, crash)
                if self.scenario.put_back is not None:
                    nursery.start_soon(self._put_back, self.scenario.put_back)
                if self.scenario.stop_seconds is not None:
                    nursery.start_soon(self._stop, self.scenario.stop_seconds)
                await self._until_over()
                nursery.cancel_scope.cancel()
        self._collect()
        return self.observed

    async def _until_over(self) -> None:
        """The run is over, and every terminal state has reached its node as a receipt."""
        while True:
            await trio.sleep(1.0)
            back = self.scenario.put_back
            last_crash = max((crash.at_seconds for crash in self.scenario.crashes), default=0.0)
            if self._service is None or self._now() < last_crash or (back and not self._is_back):
                continue
            view = self._service.run_view(RUN)
            self.observed.run_state, self.observed.version = view.state, view.version
            self.observed.waiting = view.waiting
            left = view.rollouts.held + view.rollouts.admitted
            spools = [spool.counts() for spool in self._spools.values()]
            forgetful = back is not None and back.process == "coordinator"  # it owes receipts that it knows nothing of
            quiet = all(counts.spooled == 0 and (forgetful or counts.undecided == 0) for counts in spools)
            if view.state in {"finished", "stopped"} and not left and quiet:
                self.observed.seconds = self._now()
                return

    def _now(self) -> float:
        return trio.current_time()

    def _wall(self) -> float:
        return WALL_START_SECONDS + trio.current_time()

    # processes, and their ends

    async def _supervise(self, name: str, main: Callable[[], Awaitable[None]]) -> None:
        """Start again whatever ended: crashed, or gave up because of an error."""
        while True:
            with trio.CancelScope() as scope:
                self._scopes[name] = scope
                try:
                    await main()
                except Echo2Error:
                    await trio.sleep(1.0)
            await trio.sleep(max(self._down_until.get(name, 0.0) - self._now(), 0.01))

    async def _crash(self, crash: Crash) -> None:
        await trio.sleep(crash.at_seconds)
        self._down_until[crash.process] = self._now() + crash.down_seconds
        if crash.process == "coordinator":
            self._service = None
        self._network.kill(self._identities[crash.process].peer_id)
        self._scopes[crash.process].cancel()

    async def _put_back(self, back: PutBack) -> None:
        await trio.sleep(back.copied_seconds)
        while back.copied_seconds and not any(version for _, version in self._disk.checkpoints):  # noqa: ASYNC110
            await trio.sleep(0.1)  # a copy without a trained step is as good as none
        checkpoints, store = copy.deepcopy((self._disk.checkpoints, self._stores["learner"]))
        ledger = _copy(self.ledger) if back.copied_seconds else open_ledger("sqlite://")
        await trio.sleep(max(back.at_seconds - self._now(), 0.1))
        self._is_back = True
        await self._crash(Crash(back.process, 0.0, back.down_seconds))
        if back.process == "learner":
            self._disk.checkpoints, self._stores["learner"] = checkpoints, store
            return
        lost, self.ledger = self.ledger, ledger
        if not back.copied_seconds:  # the operator hands out new join strings
            self._token, self._token_made = "", trio.Event()
            for name in self._node_names():
                await self._crash(Crash(name, 0.0, back.down_seconds))
        self.observed.forgotten = _rollouts(lost) - _rollouts(ledger)

    async def _stop(self, at_seconds: float) -> None:
        """The operator's `stop`, said again until a coordinator takes it; too late for a run that is finished."""
        await trio.sleep(at_seconds)
        while True:
            if self._service is not None:
                with suppress(Refused):
                    self._service.stop_run(RUN, actor="simulation", reason="enough")
                return
            await trio.sleep(0.5)

    async def _coordinator(self) -> None:
        scenario = self.scenario
        run = RunConfig(
            name=RUN,
            task=scenario.task,
            model_dir=Path("model"),
            learner=self._identities["learner"].peer_id,
            steps=scenario.steps,
            seed=scenario.seed,
            S=scenario.S,
            kappa=scenario.kappa,
            R=scenario.R,
            n=scenario.n,
            tokens_max=6 if scenario.task == "simulated" else 40,
            turn_tokens_max=6,
            slice_samples_max=2,
            lease_seconds=scenario.lease_seconds,
            eval_every=scenario.eval_every,
            eval_samples=scenario.eval_samples,
            eval_share=scenario.eval_share,
            budget=scenario.budget,
        )
        activation = ActivationConfig(period_seconds=1.0) if scenario.prices else ActivationConfig()
        admission = AdmissionConfig(
            warmup_leases=scenario.warmup_leases, suspension_seconds=scenario.suspension_seconds
        )
        config = CoordinatorConfig(
            heartbeat_seconds=scenario.heartbeat_seconds, run=run, activation=activation, admission=admission
        )
        async with self._network.transport(self._identities["coordinator"]) as transport:
            service = CoordinatorService(
                config=config,
                identity=self._identities["coordinator"],
                transport=transport,
                ledger=self.ledger,
                scorer=InlineScorer({scenario.task: self._task}),
                clock=self._now,
                wall=self._wall,
                entropy=self._rng.randbytes,
                task=self._task,
                text=simulated_text(),
            )
            if not self._token:
                self._token = service.create_token(
                    uses=scenario.nodes, expires_seconds=None, actor="simulation", reason="nodes"
                )
                self._token_made.set()
            self._service = service
            await service.run()

    async def _learner(self) -> None:
        scenario = self.scenario
        store = self._stores["learner"]

        def write(name: str, data: bytes) -> Path:
            store.files[Path(name)] = data
            return Path(name)

        coordinator = self._identities["coordinator"].peer_id
        async with self._network.transport(self._identities["learner"]) as transport:
            trainer = _WatchedTrainer(
                self.observed,
                disk=self._disk,
                write=write,
                train_seconds=scenario.train_seconds,
                snapshot_bytes=scenario.snapshot_bytes,
            )
            await LearnerService(
                config=LearnerConfig(
                    home=Path("learner"),
                    model_dir=Path("model"),
                    coordinator=f"/ip4/127.0.0.1/tcp/1/p2p/{coordinator}",
                    run=RUN,
                    partial_seconds=scenario.partial_seconds,
                    adapter=AdapterSettings() if scenario.adapters else None,
                ),
                identity=self._identities["learner"],
                transport=transport,
                coordinator=PeerAddress(peer=coordinator, addresses=(f"/memory/{coordinator}",)),
                run=RUN,
                trainer=trainer,
                store=store,
                broadcaster=Broadcaster(transport, store, coordinator, clock=self._now, complain=lambda *_: None),
                clock=self._now,
                wall=self._wall,
            ).run()

    def _node_main(self, name: str) -> Callable[[], Awaitable[None]]:
        async def main() -> None:
            scenario = self.scenario
            price = dict(zip(self._node_names(), scenario.prices, strict=False)).get(name, 0.0)
            await self._token_made.wait()
            coordinator = self._identities["coordinator"].peer_id
            async with self._network.transport(self._identities[name]) as transport:
                await NodeService(
                    config=NodeSettings(
                        name=name, receipts_seconds=1.0, statements_seconds=1.0, batch=8, price_hour=price
                    ),
                    identity=self._identities[name],
                    transport=transport,
                    join=JoinString(coordinator, (f"/memory/{coordinator}",), self._token, RUN),
                    engine=FakeEngine(
                        rollout_seconds=scenario.rollout_seconds,
                        tokens=seeded_tokens if scenario.task == "simulated" else _race_tokens,
                    ),
                    sandbox=InlineScorer(),
                    home=name.encode().ljust(16)[:16],
                    store=self._stores[name],
                    spool=self._spools[name],
                    papers=self.papers[name],
                    clock=self._now,
                    rng=random.Random(self._rng.random()),
                    show=lambda status: self._node_status.update({name: status}),
                ).run()

        return main

    # what the disks hold at the end

    def _collect(self) -> None:
        observed = self.observed
        table = schema.rollouts
        evaluated: set[bytes] = set()
        with self.ledger.reading() as connection:
            for row in connection.execute(sa.select(table)):
                if row.kind == "train":
                    observed.ledger[bytes(row.lease_id), row.sample] = row.state
                else:
                    evaluated.add(bytes(row.lease_id))
                    if row.state == "evaluated":
                        observed.heldout.setdefault(row.version, []).append(row.reward)
            if self._is_back:  # what comes for a lease that the ledger has forgotten is refused
                leases = {bytes(lease_id) for lease_id in connection.scalars(sa.select(schema.leases.c.lease_id))}
                observed.forgotten |= {key for key in observed.acknowledged if key[0] not in leases}
            for row in connection.execute(sa.select(schema.evaluations)):
                observed.evaluations[row.version] = row._mapping["count"]
                observed.means[row.version] = row.mean
                if row.reason:
                    observed.evaluations_ended[row.version] = row.reason
            moves = schema.node_transitions
            for row in connection.execute(sa.select(moves).order_by(moves.c.peer, moves.c.number)):
                observed.transitions.setdefault(row.peer, []).append(row.event)
        for name, spool in self._spools.items():
            peer = self._identities[name].peer_id
            for signed in spool.receipt_batches(RUN):
                batch = decode_record(signed.payload, ReceiptBatch)
                observed.receipts += [
                    (peer, receipt.sequence, receipt.lease_id, receipt.sample, receipt.state)
                    for receipt in batch.receipts
                    if receipt.lease_id not in evaluated
                ]
            observed.submitted_by_nodes += spool.counts().submitted
        newest = self._disk.checkpoints[max(self._disk.checkpoints)]
        observed.consumed_by_learner = sum((stop - first) * mask.bit_count() for first, stop, mask in newest.consumed)
        for name, status in self._node_status.items():
            observed.installs += status.installs
            observed.node_states[name] = f"{status.state}: {status.waiting_for or status.last_error}"


def _race_tokens(order: SliceOrder, sample: int) -> Sequence[int]:
    return race_turn(order.seed, sample, order.drawn, order.prompt_tokens, order.sampling.tokens_max)


def _copy(ledger: Ledger) -> Ledger:
    """What a backup of the database file holds."""
    made = open_ledger("sqlite://")
    with ledger.reading() as source, made.reading() as target:
        database: Any = source.connection.driver_connection
        database.backup(target.connection.driver_connection)
    return made


def _rollouts(ledger: Ledger) -> set[tuple[bytes, int]]:
    with ledger.reading() as connection:
        rows = connection.execute(sa.select(schema.rollouts.c.lease_id, schema.rollouts.c.sample))
        return {(bytes(lease_id), sample) for lease_id, sample in rows}


class _WatchedTrainer(FakeTrainer):
    """The fake trainer, telling the simulation of every step and every resume."""

    def __init__(
        self,
        observed: Observed,
        *,
        disk: FakeDisk,
        write: Callable[[str, bytes], Path],
        train_seconds: float,
        snapshot_bytes: int,
    ) -> None:
        self._observed = observed
        self._epoch = 0
        super().__init__(
            disk=disk,
            write=write,
            train_seconds=train_seconds,
            snapshot_bytes=snapshot_bytes,
            on_train=self._trained,
        )

    def _trained(self, batch: Batch) -> None:
        self._observed.events.append(("step", self._epoch, batch))
        self._observed.trained_seconds = now = trio.current_time()
        if self._observed.first_trained_seconds is None:
            self._observed.first_trained_seconds = now

    async def restore(self) -> Progress | None:
        """As the fake's; noted as a resume."""
        progress = await super().restore()
        version = progress.version if progress else 0
        self._epoch = progress.epoch + 1 if progress else 0
        self._observed.events.append(("resume", self._epoch, version))
        return progress


class _WatchedSpool(Spool):
    """The real spool in memory, noting every rollout that the node was told is safe."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(":memory:")
        self._observed = observed
        self._train: dict[bytes, tuple[int, ...]] = {}

    def add(self, finished: Sequence[Finished]) -> None:
        """As the spool's."""
        super().add(finished)
        for item in finished:
            if item.kind == "train":
                self._train[item.slice.lease_id] = tuple(rollout.sample for rollout in item.slice.rollouts)

    def acknowledge(self, acks: Sequence[SliceAck]) -> int:
        """As the spool's; noted before it is forgotten."""
        for ack in acks:
            self._observed.acknowledged |= {(ack.lease_id, sample) for sample in self._train.get(ack.lease_id, ())}
        return super().acknowledge(acks)
