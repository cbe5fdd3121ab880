"""The learner with a coordinator that answers anything, and strangers that ask it for chunks."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import trio
from fuzz.case import Case, Step
from fuzz.generate import KINDS, Maker, Pools
from fuzz.source import WATCH, Fresh, Recorded, Source, Unserved
from fuzz.stage import CASES_A_CHECK, Replies, attack, no_exception_logged, note_tasks, nothing_left, run_virtual
from unit.learner import test_service as scene

from echo2.p2p import messages as wire
from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.errors import RETRY_SECONDS_MAX, ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Message, PeerAddress
from echo2.p2p.transport import Stream

NAME = "learner"

REPLIES: dict[str, type[Message]] = {
    "hello": wire.Welcome,
    "admitted": wire.AdmittedReply,
    "report": wire.Ack,
    "publish": wire.PublishReply,
}

REQUESTED = {"chunks": wire.ChunkRequest}

ANSWERING = ("coordinator",)

PEER = Identity(b"p" * 32)

WORLD_CASES = {"learner": 300}
"""The scripted coordinator looks through all it ever admitted, again and again."""

STEPS = 10_000
"""Of the run: more than one world's cases see."""

ATTACK_SECONDS = 600.0
ALIVE_SECONDS = RETRY_SECONDS_MAX + 300.0
"""Virtual. A learner that asks its coordinator nothing for so long is dead, unless its run is over."""

ASKERS_SECONDS = 2.0


class Coordinator(scene.Coordinator):
    """The scripted one, but it forgets what is done with, and believes the learner: what that reports may come from
    the hostile replies in this one's name."""

    async def report(self, peer: str, message: wire.LearnerReport) -> wire.Ack:
        """Note it."""
        done = {(entry.lease_id, entry.sample) for entry in message.finished}
        self.states |= {(entry.lease_id, entry.sample): entry.state for entry in message.finished}
        self.withdraw = [key for key in self.withdraw if key not in done]
        return wire.Ack(count=len(message.finished))


class Stage:
    """A learner in a small pool. Its coordinator is trusted, so progress is asked for only as signs of life."""

    def __init__(self) -> None:
        self.world = scene.World()
        self.world.coordinator = Coordinator(steps=STEPS, group_seconds=2.0)
        self.world.network.delay_seconds = 0.0
        self.silent: list[Stream] = []

    async def play(self, source: Source) -> None:
        world = self.world
        async with world.pool(), world.network.transport(PEER) as peer:
            hostile = Replies("coordinator", world.network.find(scene.COORDINATOR.peer_id), source, self.silent)
            while not source.spent:
                try:
                    async with world.learner() as service:
                        await self.live(source, peer, hostile, service)
                except* ConfigurationError:
                    source.calm = False  # said in words, and started again

    async def live(self, source: Source, peer: Any, hostile: Replies, service: Any) -> None:
        """One process of the learner's."""
        await trio.sleep(1)
        self.serve_chunks()
        while True:
            source.calm = False
            async with trio.open_nursery() as nursery:
                ends = trio.current_time() + ATTACK_SECONDS
                for _ in range(CASES_A_CHECK):
                    if source.spent or trio.current_time() > ends:
                        break
                    step = source.request()
                    if step is not None:
                        nursery.start_soon(attack, peer, _address(scene.LEARNER), step, self.silent)
                    await trio.sleep(ASKERS_SECONDS)
                if isinstance(source, Recorded):
                    source.drop()
                source.calm = True
                WATCH.begin(None)
                asked, over = hostile.asked, False
                with trio.move_on_after(ALIVE_SECONDS):
                    while hostile.asked == asked and not over:
                        await trio.sleep(10)
                        over = service.status().state in {"finished", "stopped"}
                if hostile.asked == asked and not over:
                    raise Unserved(f"the learner has fallen silent: {service.status()}")
                await nothing_left(self.world.network, scene.LEARNER.peer_id, self.silent)
                nursery.cancel_scope.cancel()
            if source.spent or over:
                note_tasks(NAME)
                return

    def serve_chunks(self) -> None:
        transport: Any = self.world.network.find(scene.LEARNER.peer_id)
        Broadcaster(
            transport,
            self.world.store,
            scene.COORDINATOR.peer_id,
            clock=trio.current_time,
            complain=lambda *_: None,
        ).serve()


def _address(who: Identity) -> PeerAddress:
    return PeerAddress(peer=who.peer_id, addresses=(f"/memory/{who.peer_id}",))


@cache
def pools() -> Pools:
    """What an undisturbed coordinator says."""

    async def learn() -> Pools:
        world = scene.World()
        async with world.pool(), world.learner():
            while len(world.coordinator.rollouts) < 8:  # noqa: ASYNC110 - the other side has no event to wait on
                await trio.sleep(1)
            rollouts = [rollout.model_dump() for rollout in world.coordinator.rollouts[:8]]
            hashes = [snapshot.manifest_hash for snapshot in world.store.snapshots()]
        manifest_hash = hashes[0] if hashes else bytes(32)
        ticket = wire.Ticket(run="demo", manifest_hash=manifest_hash, peer=PEER.peer_id)
        return {
            "run": ["demo"],
            "run_state": ["running", "running", "running", "paused"],
            "manifest_hash": [manifest_hash],
            "lease_id": [rollout["lease_id"] for rollout in rollouts],
            "sample": [0, 1, 2, 3],
            "sequence": list(range(1, 9)),
            "ordinal": [0, 1],
            "version": [0, 0, 1],
            "rollouts": [tuple(rollouts), tuple(rollouts[:3]), tuple(rollouts[:2] * 2)],
            "first": [0],
            "stop": [1, 2, 2**18],
            "stride": [1],
            "ticket": [scene.COORDINATOR.sign("ticket", ticket).model_dump()],
            "descriptor": [scene.COORDINATOR.sign("run", world.coordinator.descriptor()).model_dump()],
            "wire_version": [1],
            "wait_seconds": [0.0, 1.0],
        }

    found: Pools = run_virtual(learn)
    return found


def _maker(rng: random.Random) -> Maker:
    return Maker(rng, pools(), lambda _label: scene.COORDINATOR, PEER)


def _after(rng: random.Random) -> Any:
    return rng.choice(["read"] * 6 + ["reset", "silent"])


OFTEN = 0.2
"""Share of the looks at which a hostile peer asks."""


def draw_request(rng: random.Random) -> Step | None:
    """A request for chunks, sometimes."""
    if rng.random() > OFTEN:
        return None
    return Step("peer", "chunks", _maker(rng).request(wire.ChunkRequest), _after(rng))


def draw_reply(rng: random.Random, role: str, protocol: str, honest: bytes) -> Step:
    """The honest reply with a change, or one made up."""
    maker = _maker(rng)
    how = rng.random()
    if honest and how < 0.5:
        data = maker.bent(honest)
    else:
        data = maker.request(KINDS["refusal"] if how < 0.55 else REPLIES[protocol])
    return Step(role, protocol, data, _after(rng))


def _run(source: Source, *, seed: int = 0) -> None:
    with no_exception_logged():
        run_virtual(Stage().play, source, seed=seed)


def soak(_name: str, rng: random.Random, count: int, made: list[Fresh]) -> None:
    """`count` cases against one disk; `made` receives their source."""
    pools()
    made.append(Fresh(rng, count, request=draw_request, reply=draw_reply))
    _run(made[-1], seed=made[-1].scheduler)


def play(case: Case) -> None:
    """Raise Defect, or whatever the learner raised, if it did not bear the case."""
    _run(Recorded(case.steps, asked_for=ANSWERING), seed=case.scheduler)
