"""The learner with a coordinator that answers anything, and strangers that ask it for chunks."""

from __future__ import annotations

from functools import cache
from typing import Any

import trio
from fuzz.case import Case, Step
from fuzz.replies import Replies
from fuzz.stage import Defect, attack, no_exception_logged, nothing_left, run_virtual
from fuzz.strategies import SIGNED_RECORDS, Pools, records, requests, signed
from hypothesis import strategies as st
from unit.learner import test_service as scene

from echo2.p2p import messages as wire
from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Message, PeerAddress

NAME = "learner"

REPLIES: dict[str, type[Message]] = {
    "hello": wire.Welcome,
    "admitted": wire.AdmittedReply,
    "report": wire.Ack,
    "publish": wire.PublishReply,
}

PEER = Identity(b"p" * 32)

ATTACK_SECONDS = 600.0
ALIVE_SECONDS = 300.0
"""Virtual. A learner that asks its coordinator nothing for so long is dead, unless its run is over."""


class Stage:
    """A learner in a small pool. Its coordinator is trusted, so progress is asked for only as signs of life."""

    def __init__(self) -> None:
        self.world = scene.World()

    async def play(self, case: Case) -> None:
        world = self.world
        async with world.pool(), trio.open_nursery() as nursery, world.network.transport(PEER) as peer:
            hostile = Replies([step for step in case.steps if step.role == "coordinator"], nursery)
            hostile.stand_before(world.network.find(scene.COORDINATOR.peer_id))
            try:
                async with world.learner() as service:
                    await trio.sleep(1)
                    self.serve_chunks()
                    for step in case.steps:
                        if step.role == "peer":
                            await attack(peer, _address(scene.LEARNER), step, nursery)
                    with trio.move_on_after(ATTACK_SECONDS):
                        while hostile.left:  # noqa: ASYNC110 - the other side has no event to wait on
                            await trio.sleep(1)
                    hostile.drop()
                    asked = hostile.asked
                    await trio.sleep(ALIVE_SECONDS)
                    if hostile.asked == asked and service.status().state not in {"finished", "stopped"}:
                        raise Defect("the learner has fallen silent")
                    await nothing_left(world.network, scene.LEARNER.peer_id)
            except* ConfigurationError:
                pass
            nursery.cancel_scope.cancel()

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


def play(case: Case) -> None:
    """Raise Defect, or whatever the learner raised, if it did not bear the case."""
    with no_exception_logged():
        run_virtual(Stage().play, case)


@cache
def pools() -> Pools:
    """What an undisturbed coordinator says."""

    async def learn() -> Pools:
        world = scene.World()
        async with world.pool(), world.learner():
            while len(world.coordinator.rollouts) < 8:  # noqa: ASYNC110 - the other side has no event to wait on
                await trio.sleep(1)
            rollouts = [rollout.model_dump() for rollout in world.coordinator.rollouts[:8]]
        hashes = list(world.store._entries) if hasattr(world.store, "_entries") else []
        manifest_hash = hashes[0] if hashes else bytes(32)
        ticket = wire.Ticket(run="demo", manifest_hash=manifest_hash, peer=PEER.peer_id)
        return {
            "run": ["demo"],
            "run_state": ["running", "paused"],
            "manifest_hash": [manifest_hash],
            "lease_id": [rollout["lease_id"] for rollout in rollouts],
            "sample": [0, 1, 2, 3],
            "sequence": list(range(1, 9)),
            "ordinal": [0, 1],
            "version": [0, 0, 1],
            "rollouts": [tuple(rollouts), tuple(rollouts[:3]), tuple(rollouts[:2] * 2)],
            "first": [0],
            "stop": [1, 2**18],
            "ticket": [scene.COORDINATOR.sign("ticket", ticket).model_dump()],
            "descriptor": [scene.COORDINATOR.sign("run", world.coordinator.descriptor()).model_dump()],
            "wire_version": [1],
        }

    found: Pools = run_virtual(learn)
    return found


@st.composite
def sign(draw: Any, kind: type[Message], body: dict[str, Any]) -> dict[str, Any]:
    """Signed fields by the coordinator, mostly; else by somebody, or of nothing."""
    for name in body:
        if (kind.TYPE, name) in SIGNED_RECORDS:
            label, record = SIGNED_RECORDS[kind.TYPE, name]
            how = draw(st.sampled_from(["own"] * 6 + ["other", "label", "junk"]))
            if how == "junk" or (how == "own" and name in pools() and draw(st.booleans())):
                continue
            signer = scene.COORDINATOR if how == "own" else PEER
            body[name] = signed(signer, "run" if how == "label" else label, draw(records(record, pools())))
    return body


@st.composite
def steps(draw: Any) -> Step:
    role = draw(st.sampled_from(["coordinator"] * 4 + ["peer"]))
    kinds = REPLIES if role == "coordinator" else {"chunks": wire.ChunkRequest}
    protocol = draw(st.sampled_from(sorted(kinds)))
    data = draw(requests(kinds[protocol], pools(), sign))
    return Step(role, protocol, data, draw(st.sampled_from(["read", "read", "read", "reset", "silent"])))


def cases() -> st.SearchStrategy[Case]:
    """Replies and requests in any order."""
    return st.lists(steps(), min_size=1, max_size=12).map(lambda found: Case(NAME, tuple(found)))
