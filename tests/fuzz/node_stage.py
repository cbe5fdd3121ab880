"""A node among hostile peers: a coordinator and a learner that answer anything, and strangers that ask for chunks."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import trio
from fuzz.case import Case, Step
from fuzz.generate import KINDS, Maker, Pools
from fuzz.source import WATCH, Fresh, Recorded, Source, Unserved
from fuzz.stage import CASES_A_CHECK, Replies, attack, no_exception_logged, note_tasks, nothing_left, run_virtual
from unit.node.conftest import COORDINATOR, LEARNER, NODE, RUN, Pool

from echo2.node.fake_engine import FakeEngine
from echo2.p2p import messages as wire
from echo2.p2p.errors import RETRY_SECONDS_MAX, ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Message, PeerAddress
from echo2.p2p.plan import build_plan
from echo2.p2p.transport import Stream

NAME = "node"

REPLIES: dict[str, type[Message]] = {
    "hello": wire.Welcome,
    "heartbeat": wire.HeartbeatReply,
    "manifest": wire.ManifestReply,
    "leases": wire.LeaseReply,
    "rollouts": wire.SubmitReply,
    "receipts": wire.ReceiptsReply,
}
"""What its coordinator answers. Nothing of ours asks a node anything but for chunks; its learner sends it these."""

ANSWERING = ("coordinator", "learner")

PEER, STRANGER = Identity(b"\x04" * 32), Identity(b"\x05" * 32)
"""One with a ticket of the coordinator's, one without."""

WORLD_CASES = {"node": 2000}

SEQUENCE_TOKENS_MAX = 256
"""Of its engine, which refuses more: a real one takes a gigabyte of context and its time, the fake one ours."""

ATTACK_SECONDS = 600.0
"""Virtual. The hostile replies a node has not asked for by then are left away."""

PROGRESS_SECONDS = 4 * RETRY_SECONDS_MAX
"""Virtual. Above the longest wait that a reply may order, with a few turned away in a row."""

ASKERS_SECONDS = 1.0
"""Virtual. Between two hostile requests; meanwhile the node asks its coordinator, and is answered."""


class Stage:
    """A node, and the pool it is in."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.engine = FakeEngine(sequence_tokens_max=SEQUENCE_TOKENS_MAX)
        self.pool.network.delay_seconds = 0.0
        self.silent: list[Stream] = []
        self.version = 0
        self.node: Any = None

    async def play(self, source: Source) -> None:
        pool = self.pool
        async with pool.running():
            await pool.publish(0)
            pool.work = 4
            async with pool.network.transport(PEER) as peer, pool.network.transport(STRANGER) as stranger:
                roles = {"peer": peer, "stranger": stranger}
                Replies("coordinator", pool.network.find(COORDINATOR.peer_id), source, self.silent)
                Replies("learner", pool.network.find(LEARNER.peer_id), source, self.silent)
                while not source.spent:
                    try:
                        async with pool.node() as self.node:
                            await self.live(source, roles)
                    except* ConfigurationError:
                        source.calm = False  # a final no ends a node in words, as it should; its supervisor starts it

    async def live(self, source: Source, roles: dict[str, Any]) -> None:
        """One process of the node's."""
        await trio.sleep(1)
        while True:
            source.calm = False
            async with trio.open_nursery() as nursery:
                ends = trio.current_time() + ATTACK_SECONDS
                for number in range(CASES_A_CHECK):
                    if source.spent or trio.current_time() > ends:
                        break
                    if number % 10 == 0:
                        self.pool.work = max(self.pool.work, 2)
                    step = source.request()
                    if step is not None:
                        nursery.start_soon(attack, roles[step.role], _address(NODE), step, self.silent)
                    await trio.sleep(ASKERS_SECONDS)
                if isinstance(source, Recorded):
                    source.drop()
                source.calm = True
                WATCH.begin(None)
                await self.progress()
                await nothing_left(self.pool.network, NODE.peer_id, self.silent)
                nursery.cancel_scope.cancel()
            if source.spent:
                note_tasks(NAME)
                return

    async def progress(self) -> None:
        """With honest peers again, a new snapshot is installed and work under it is done and handed in.

        The coordinator breaks the connection first: a node believes the signed welcome it had, which may name another
        learner, until it has to say hello again.
        """
        pool = self.pool
        coordinator = pool.network.find(COORDINATOR.peer_id)
        with trio.move_on_after(2 * RETRY_SECONDS_MAX):
            while not coordinator.ends_with(NODE.peer_id):
                await trio.sleep(0.1)
                WATCH.begin(None)  # half an hour of heartbeats four times a second, as a welcome may order, is no hang
        await coordinator.disconnect(NODE.peer_id)
        self.version += 1
        manifest_hash = await pool.publish(self.version, data=self.version.to_bytes(4, "big") * 25_000)
        for old in pool.learner_store.snapshots()[:-2]:
            await pool.learner_store.discard(old.manifest_hash)
        with trio.move_on_after(PROGRESS_SECONDS):
            while not any(piece.manifest_hash == manifest_hash for piece in pool.received[-64:]):
                pool.work = max(pool.work, 1)
                await trio.sleep(5)
                WATCH.begin(None)  # an hour of heartbeats four times a second, as a welcome may order, is no hang
            return
        raise Unserved(f"the node does no work any more: {self.node.status}")


def _address(who: Identity) -> PeerAddress:
    return PeerAddress(peer=who.peer_id, addresses=(f"/memory/{who.peer_id}",))


@cache
def pools() -> Pools:
    """What an undisturbed pool says, the same each time."""

    async def learn() -> Pools:
        pool = Pool()
        async with pool.running():
            await pool.publish(0)
            pool.work = 4
            async with pool.node():
                while len(pool.receipts) < 8:  # noqa: ASYNC110 - the other side has no event to wait on
                    await trio.sleep(1)
                signed_manifest, manifest, manifest_hash = pool.published
                ticket = wire.Ticket(run=RUN, manifest_hash=manifest_hash, peer=PEER.peer_id)
                plan = build_plan(
                    "star",
                    manifest=manifest,
                    manifest_hash=manifest_hash,
                    root=_address(LEARNER),
                    nodes=[_address(NODE), _address(PEER)],
                )
                data = next(iter(pool.learner_store.files.values()))
                leases = [lease.model_dump() for lease in pool.leased.values()]
                return {
                    "run": [RUN],
                    "manifest_hash": [manifest_hash],
                    "session": [pool.beats[0][1].session],
                    "sequence": [1, 2, 3, 4, 5],
                    "peer": [NODE.peer_id, PEER.peer_id],
                    "node_state": ["active", "active", "active", "suspended", "banned"],
                    "run_state": ["running", "running", "paused", "stopped"],
                    "epoch": [0, 0, 1],
                    "version": [0, 1],
                    "lease_id": [lease["lease_id"] for lease in leases],
                    "leases": [tuple(leases), tuple(leases[:1]), (leases[0], leases[0])],
                    "acks": [
                        tuple({"lease_id": lease["lease_id"], "state": "held", "reason": ""} for lease in leases[:n])
                        for n in (0, 1, len(leases))
                    ],
                    "first": [0, 1],
                    "stop": [1, 2, 2**18],
                    "stride": [1],
                    "index": [0, 1],
                    "data": [data[: manifest.chunk_bytes], data[manifest.chunk_bytes :]],
                    "manifest": [signed_manifest.model_dump()],
                    "plan": [COORDINATOR.sign("plan", plan).model_dump()],
                    "ticket": [COORDINATOR.sign("ticket", ticket).model_dump()],
                    "learner": [_address(LEARNER).model_dump()],
                    "wire_version": [1],
                    "retry_seconds": [0.0, 1.0, 60.0],
                    "wait_seconds": [0.0, 1.0],
                }

    found: Pools = run_virtual(learn)
    return found


def _signer(label: str) -> Identity:
    return LEARNER if label == "manifest" else COORDINATOR


def _after(rng: random.Random) -> Any:
    return rng.choice(["read"] * 6 + ["reset", "silent"])


REQUESTED = {"chunks": wire.ChunkRequest}

OFTEN = 0.2
"""Share of the looks at which a hostile peer asks."""


def draw_request(rng: random.Random) -> Step | None:
    """A request for chunks, sometimes."""
    if rng.random() > OFTEN:
        return None
    maker = Maker(rng, pools(), _signer, STRANGER)
    return Step(rng.choice(["peer", "peer", "stranger"]), "chunks", maker.request(wire.ChunkRequest), _after(rng))


def draw_reply(rng: random.Random, role: str, protocol: str, honest: bytes) -> Step:
    """The honest reply with a change, or one made up."""
    maker = Maker(rng, pools(), _signer, STRANGER)
    kind = wire.Chunk if role == "learner" else REPLIES[protocol]
    how = rng.random()
    if honest and how < 0.5:
        data = maker.bent(honest)
    elif how < 0.55:
        data = maker.request(KINDS["refusal"])
    else:
        data = maker.request(kind)
    return Step(role, protocol, data, _after(rng))


def _run(source: Source, *, seed: int = 0) -> None:
    with no_exception_logged():
        run_virtual(Stage().play, source, seed=seed)


def soak(_name: str, rng: random.Random, count: int, made: list[Fresh]) -> None:
    """`count` cases against one home; `made` receives their source."""
    pools()
    made.append(Fresh(rng, count, request=draw_request, reply=draw_reply))
    _run(made[-1], seed=made[-1].scheduler)


def play(case: Case) -> None:
    """Raise Defect, or whatever the node raised, if it did not bear the case."""
    _run(Recorded(case.steps, asked_for=ANSWERING), seed=case.scheduler)
