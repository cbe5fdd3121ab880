"""The coordinator among hostile peers: a stranger, an admitted node gone bad, and (trusted, but fuzzed) the learner."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import trio
from fuzz.case import Case, Step
from fuzz.stage import Defect, attack, no_exception_logged, nothing_left, run_virtual
from fuzz.strategies import SIGNED_RECORDS, Pools, records, requests, signed
from hypothesis import strategies as st
from unit.coordinator.conftest import Learner, Node, World, answer, identity

from echo2.p2p.identity import Identity
from echo2.p2p.messages import (
    AdmittedRequest,
    Heartbeat,
    Hello,
    LearnerReport,
    LeaseRequest,
    ManifestRequest,
    Message,
    PeerAddress,
    PublishRequest,
    ReceiptsRequest,
    SubmitRequest,
    TokenizerRequest,
)

NAME = "coordinator"

PROTOCOLS: dict[str, type[Message]] = {
    "hello": Hello,
    "heartbeat": Heartbeat,
    "manifest": ManifestRequest,
    "leases": LeaseRequest,
    "tokenizer": TokenizerRequest,
    "rollouts": SubmitRequest,
    "receipts": ReceiptsRequest,
    "admitted": AdmittedRequest,
    "report": LearnerReport,
    "publish": PublishRequest,
}

LEARNER, HONEST, BAD, STRANGER = (identity(number) for number in (2, 3, 4, 5))
KEYS: dict[str, Identity] = {"learner": LEARNER, "node": BAD, "stranger": STRANGER}

ROUNDS = 2
"""What the honest node gets done after the attack: leases, delivers, is acknowledged."""

ROUNDS_MAX = 12
"""Within two virtual minutes: by then what a bad node held has expired."""


class Stage:
    """A coordinator that has published version 0 and evaluated it, an honest node at work and a bad one admitted."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder / "ledger.sqlite3", run_settings={"steps": 1000})

    async def play(self, case: Case) -> None:
        world = self.world
        async with world.serving(), world.learner() as learner, world.node(3) as honest, world.node(4) as bad:
            await self.set_up(learner, honest, bad)
            async with world.network.transport(STRANGER) as stranger, trio.open_nursery() as nursery:
                roles = {"learner": learner.transport, "node": bad.transport, "stranger": stranger}
                for step in case.steps:
                    await attack(roles[step.role], self.target, step, nursery)
                if not any(step.role == "learner" for step in case.steps):  # it may end the run: it is trusted to
                    await self.progress(learner, honest)
                await nothing_left(world.network, world.coordinator.peer_id)
                nursery.cancel_scope.cancel()

    @property
    def target(self) -> PeerAddress:
        peer = self.world.coordinator.peer_id
        return PeerAddress(peer=peer, addresses=(f"/memory/{peer}",))

    async def set_up(self, learner: Learner, honest: Node, bad: Node) -> Pools:
        world = self.world
        token = world.token()
        await learner.hello()
        manifest_hash, _ = await learner.publish()
        await honest.hello(token)
        await honest.join(hello=False)
        while not any(lease.kind == "train" for lease in await honest.work(wait=1.0)):
            pass
        await bad.hello(token)
        await bad.join(hello=False)
        held = (await bad.lease(4)).leases
        theirs = (await honest.lease(4)).leases
        await honest.submit(*map(answer, theirs))
        leases = [*held, *theirs]
        if not held:
            raise Defect("the set-up gave the bad node no lease")
        return {
            "run": ["r1"],
            "role": ["node", "learner"],
            "wire_versions": [(1,)],
            "name": ["volunteer"],
            "token": [token, ""],
            "manifest_hash": [manifest_hash],
            "lease_id": [lease.lease_id for lease in leases],
            "session": [bad.session, honest.session],
            "sequence": [0, 1, 2, 3, 1000],
            "sample": [0, 1, 2, 3],
            "rollouts": [answer(lease).model_dump()["rollouts"] for lease in leases],
            "slices": [(answer(lease).model_dump(),) for lease in leases],
            "hold_seconds": [0.0, 30.0, 1e9],
            "wait_seconds": [0.0, 30.0, 1e9],
            "peer": [BAD.peer_id, HONEST.peer_id, LEARNER.peer_id],
        }

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
                    raise Defect(f"the honest node's work is not kept: {acks}")
                done += 1
            await learner.train((await learner.fetch(wait=2.0)).rollouts)
            await learner.publish(version=learner.version)
            if done == ROUNDS:
                return
        raise Defect(f"the honest node gets no lease: {reason}")


def play(case: Case) -> None:
    """Raise Defect, or whatever the coordinator raised, if it did not bear the case."""
    with tempfile.TemporaryDirectory() as folder, no_exception_logged():
        run_virtual(Stage(Path(folder)).play, case)


@cache
def pools() -> Pools:
    """What the set-up hands out, the same each time: the world's entropy is seeded."""

    async def learn(stage: Stage) -> Pools:
        world = stage.world
        async with world.serving(), world.learner() as learner, world.node(3) as honest, world.node(4) as bad:
            return await stage.set_up(learner, honest, bad)

    with tempfile.TemporaryDirectory() as folder:
        found: Pools = run_virtual(learn, Stage(Path(folder)))
    return found


def signing(role: str) -> Any:
    """Signed fields by the sender's own key, mostly; else by another's, under another label, or of nothing."""

    @st.composite
    def sign(draw: Any, kind: type[Message], body: dict[str, Any]) -> dict[str, Any]:
        for name in body:
            if (kind.TYPE, name) in SIGNED_RECORDS:
                label, record = SIGNED_RECORDS[kind.TYPE, name]
                how = draw(st.sampled_from(["own"] * 6 + ["other", "label", "junk"]))
                if how == "junk":
                    continue
                signer = KEYS[role] if how == "own" else HONEST
                body[name] = signed(signer, "run" if how == "label" else label, draw(records(record, pools())))
        return body

    return sign


@st.composite
def steps(draw: Any, roles: tuple[str, ...]) -> Step:
    role = draw(st.sampled_from(roles))
    protocol = draw(st.sampled_from(sorted(PROTOCOLS)))
    data = draw(requests(PROTOCOLS[protocol], pools(), signing(role)))
    return Step(role, protocol, data, draw(st.sampled_from(["read", "read", "read", "reset", "silent"])))


def cases(roles: tuple[str, ...] = ("node", "node", "stranger")) -> st.SearchStrategy[Case]:
    """Sequences of requests in any order, repeated at will."""
    return st.lists(steps(roles), min_size=1, max_size=12).map(lambda found: Case(NAME, tuple(found)))
