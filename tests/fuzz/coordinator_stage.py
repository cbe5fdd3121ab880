"""The coordinator among hostile peers: strangers, an admitted node gone bad, and (trusted, but fuzzed) the learner."""

from __future__ import annotations

import random
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio
from fuzz.case import Case, Step
from fuzz.generate import Maker, Pools
from fuzz.source import WATCH, Fresh, Recorded, Source, Unserved
from fuzz.stage import CASES_A_CHECK, attack, no_exception_logged, note_tasks, nothing_left, run_virtual
from unit.coordinator.conftest import Learner, Node, World, answer, identity

from echo2.p2p import messages as wire
from echo2.p2p.errors import Refused
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Message, PeerAddress
from echo2.p2p.transport import Stream

NAME = "coordinator"

PROTOCOLS: dict[str, type[Message]] = {
    "hello": wire.Hello,
    "heartbeat": wire.Heartbeat,
    "manifest": wire.ManifestRequest,
    "leases": wire.LeaseRequest,
    "tokenizer": wire.TokenizerRequest,
    "rollouts": wire.SubmitRequest,
    "receipts": wire.ReceiptsRequest,
    "statement": wire.StatementRequest,
    "appeal": wire.AppealRequest,
    "admitted": wire.AdmittedRequest,
    "report": wire.LearnerReport,
    "publish": wire.PublishRequest,
}

LEARNER, HONEST, BAD = (identity(number) for number in (2, 3, 4))
STRANGER = identity(5)
KEYS: dict[str, Identity] = {"learner": LEARNER, "node": BAD, "stranger": STRANGER}

WORLD_CASES = {"coordinator": 4000, "confused-learner": 400}
"""Cases for one coordinator; then a new one. A learner gone mad soon has the run where nothing more can happen."""

MEMORY_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""The ledger syncs each transaction; that is none of the fuzzer's business."""

ROUNDS = 2
"""What the honest node gets done after the attack: leases, delivers, is acknowledged."""

ROUNDS_MAX = 12
"""Within two virtual minutes: by then what a bad node held has expired."""

BAD_HOME = b"h" * 16

HELLOS_MAX = 8

REPLY_SECONDS = 0.05
"""Virtual: one round trip and what is at once. The hostile do not wait for each other longer, so held ones pile up."""


class Stage:
    """A coordinator that has published version 0 and evaluated it, an honest node at work and a bad one admitted."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder / "ledger.sqlite3", run_settings={"steps": 100_000})
        self.world.network.delay_seconds = 0.0  # each hop would be a jump of the clock, in which nothing happens
        self.pools: Pools = {}
        self.silent: list[Stream] = []
        self.mad = False
        self.newest = b""

    async def play(self, source: Source) -> None:
        world = self.world
        async with world.serving(), world.learner() as learner, world.node(3) as honest, world.node(4) as bad:
            await self.set_up(learner, honest, bad)
            while True:
                await self.batch(source, learner, honest, bad)
                WATCH.begin(None)
                await self.check(learner, honest, bad)
                if source.spent:
                    break
            note_tasks(NAME)

    async def batch(self, source: Source, learner: Learner, honest: Node, bad: Node) -> None:
        """Hostile requests, each with an honest one beside it."""
        async with self.world.network.transport(STRANGER) as stranger, trio.open_nursery() as nursery:
            roles = {"learner": learner.transport, "node": bad.transport, "stranger": stranger}
            for number in range(CASES_A_CHECK):
                step = source.request()
                if step is None:
                    break
                self.mad |= step.role == "learner"
                done = trio.Event()
                nursery.start_soon(self._attack, roles[step.role], step, done)
                with trio.move_on_after(REPLY_SECONDS):
                    await done.wait()
                await self.ask(honest, number)
            await nothing_left(self.world.network, self.world.coordinator.peer_id, self.silent)
            nursery.cancel_scope.cancel()

    async def _attack(self, transport: Any, step: Step, done: trio.Event) -> None:
        await attack(transport, self.target, step, self.silent)
        done.set()

    async def ask(self, honest: Node, number: int) -> None:
        """Something small, which is answered at once."""
        try:
            with trio.fail_after(1.0):
                if number % 8 == 0:
                    await honest.heartbeat()
                elif number % 8 == 4:
                    await honest.receipts(after=2**40)
                else:
                    asked = wire.ManifestRequest(run="r1", manifest_hash=self.newest)
                    with suppress(Refused):  # another version may be the newest by now: that is an answer as well
                        await honest.ask("manifest", asked, wire.ManifestReply)
        except trio.TooSlowError as error:
            raise Unserved("the honest node gets no answer") from error

    async def check(self, learner: Learner, honest: Node, bad: Node) -> None:
        """The honest get on, and the bad node holds leases again."""
        self.newest = (await honest.heartbeat()).manifest_hash or self.newest
        if self.mad:  # it may end the run: it is trusted to
            return
        await self.progress(learner, honest)
        service = self.world.service
        if service._office.pool.nodes[bad.peer_id].state == "suspended":
            service.restore_node(bad.peer_id, actor="fuzz", reason="it shall go on")
        bad.session = self.world.rng.randbytes(16)
        bad.sequence = 0
        await self._start_anew(bad)
        await bad.join(hello=False)
        leases = [*(await bad.lease(4)).leases]
        if leases:
            self.pools |= _of_leases(leases)
        self.pools["session"] = [bad.session, honest.session]
        self.pools["manifest_hash"] = [bad.installed]

    async def _start_anew(self, bad: Node) -> None:
        """As a process that is started again: at once, or when the session that it made up is over."""
        for _ in range(HELLOS_MAX):
            try:
                await bad.hello(session=bad.session, home=BAD_HOME)
                return
            except Refused as refused:
                if refused.code not in {"identity_live", "too_often"} or refused.retry_seconds is None:
                    raise
                await trio.sleep(refused.retry_seconds + 1.0)
        raise Unserved("the bad node is not let in again")

    @property
    def target(self) -> PeerAddress:
        peer = self.world.coordinator.peer_id
        return PeerAddress(peer=peer, addresses=(f"/memory/{peer}",))

    async def set_up(self, learner: Learner, honest: Node, bad: Node) -> None:
        world = self.world
        token = world.token()
        await learner.hello()
        manifest_hash, _ = await learner.publish()
        self.newest = manifest_hash
        await honest.hello(token)
        await honest.join(hello=False)
        while not any(lease.kind == "train" for lease in await honest.work(wait=1.0)):
            pass
        await bad.hello(token, session=bad.session, home=BAD_HOME)
        await bad.join(hello=False)
        held = (await bad.lease(4)).leases
        theirs = (await honest.lease(4)).leases
        await honest.submit(*map(answer, theirs))
        if not held:
            raise Unserved("the set-up gave the bad node no lease")
        self.pools |= {
            "run": ["r1"],
            "role": ["node", "learner"],
            "wire_versions": [(1,)],
            "name": ["volunteer"],
            "token": [token, ""],
            "manifest_hash": [manifest_hash],
            "session": [bad.session, honest.session],
            "sequence": [0, 1, 2, 3, 1000],
            "sample": [0, 1, 2, 3],
            "hold_seconds": [0.0, 30.0, 1e9],
            "wait_seconds": [0.0, 30.0, 1e9],
            "peer": [BAD.peer_id, HONEST.peer_id, LEARNER.peer_id],
        } | _of_leases([*held, *theirs])

    async def progress(self, learner: Learner, honest: Node) -> None:
        """The honest pair beside it keeps its progress: leases, deliveries, a step, a new version, and again."""
        done = 0
        reason = ""
        for _ in range(ROUNDS_MAX):
            notice = await honest.heartbeat()
            if notice.manifest_hash != honest.installed:
                honest.installed = notice.manifest_hash
                await honest.heartbeat()
            reply = await honest.lease(wait=10.0)
            reason = reply.reason
            if reply.leases:
                acks = await honest.submit(*map(answer, reply.leases))
                if any(ack.state != "held" for ack in acks):
                    raise Unserved(f"the honest node's work is not kept: {acks}")
                done += 1
            await learner.train((await learner.fetch(wait=2.0)).rollouts)
            try:
                await learner.publish(version=learner.version)
            except Refused as refused:
                reason = str(refused)
            if done == ROUNDS:
                return
        raise Unserved(f"the honest node gets no lease: {reason}")


def _of_leases(leases: list[wire.Lease]) -> Pools:
    slices = [answer(lease).model_dump() for lease in leases]
    return {
        "lease_id": [lease.lease_id for lease in leases],
        "rollouts": [one["rollouts"] for one in slices],
        "slices": [*((one,) for one in slices), tuple(slices), (slices[0], slices[0])],
    }


def draw(stage: Stage, roles: tuple[str, ...], rng: random.Random) -> Step:
    """Any request of any of the roles."""
    role = rng.choice(roles)
    protocol = rng.choice(list(PROTOCOLS))
    maker = Maker(rng, stage.pools, lambda _label: KEYS[role], HONEST)
    return Step(role, protocol, maker.request(PROTOCOLS[protocol]), rng.choice(["read"] * 6 + ["reset", "silent"]))


ROLES = {"coordinator": ("node", "node", "stranger"), "confused-learner": ("learner", "learner", "learner", "node")}


def _run(make: Any) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder, no_exception_logged():
        stage = Stage(Path(folder))
        source, seed = make(stage)
        run_virtual(stage.play, source, seed=seed)


def soak(name: str, rng: random.Random, count: int, made: list[Fresh]) -> None:
    """`count` cases against one coordinator; `made` receives their source."""

    def make(stage: Stage) -> tuple[Fresh, int]:
        made.append(Fresh(rng, count, request=partial(draw, stage, ROLES[name])))
        return made[-1], made[-1].scheduler

    _run(make)


def play(case: Case) -> None:
    """Raise Defect, or whatever the coordinator raised, if it did not bear the case."""
    _run(lambda _stage: (Recorded(case.steps, asked_for=()), case.scheduler))
