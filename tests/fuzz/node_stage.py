"""A node among hostile peers: a coordinator and a learner that answer anything, and strangers that ask for chunks."""

from __future__ import annotations

from functools import cache
from typing import Any

import trio
from fuzz.case import Case, Step
from fuzz.replies import Replies
from fuzz.stage import Defect, attack, no_exception_logged, nothing_left, run_virtual
from fuzz.strategies import SIGNED_RECORDS, Pools, records, requests, signed
from hypothesis import strategies as st
from unit.node.conftest import COORDINATOR, LEARNER, NODE, RUN, Pool

from echo2.p2p import messages as wire
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Message, PeerAddress
from echo2.p2p.plan import build_plan

NAME = "node"

REPLIES: dict[str, type[Message]] = {
    "hello": wire.Welcome,
    "heartbeat": wire.HeartbeatReply,
    "manifest": wire.ManifestReply,
    "leases": wire.LeaseReply,
    "rollouts": wire.SubmitReply,
    "receipts": wire.ReceiptsReply,
}

PEER, STRANGER = Identity(b"\x04" * 32), Identity(b"\x05" * 32)
"""One with a ticket of the coordinator's, one without."""

ATTACK_SECONDS = 600.0
"""Virtual. The hostile replies a node has not asked for by then are left away."""

PROGRESS_SECONDS = 4 * 3600.0
"""Virtual. Above the longest wait that a reply may order."""


class Stage:
    """A node, and the pool it is in."""

    def __init__(self) -> None:
        self.pool = Pool()

    async def play(self, case: Case) -> None:
        pool = self.pool
        async with pool.running():
            await pool.publish(0)
            pool.work = 4
            async with (
                pool.network.transport(PEER) as peer,
                pool.network.transport(STRANGER) as stranger,
                trio.open_nursery() as nursery,
            ):
                roles = {"peer": peer, "stranger": stranger}
                hostile = [
                    Replies([step for step in case.steps if step.role == role], nursery)
                    for role in ("coordinator", "learner")
                ]
                hostile[0].stand_before(pool.network.find(COORDINATOR.peer_id))
                hostile[1].stand_before(pool.network.find(LEARNER.peer_id))
                try:
                    async with pool.node():
                        await trio.sleep(1)
                        for step in case.steps:
                            if step.role in roles:
                                await attack(roles[step.role], _address(NODE), step, nursery)
                        with trio.move_on_after(ATTACK_SECONDS):
                            while any(one.left for one in hostile):  # noqa: ASYNC110 - the other side has no event to wait on
                                await trio.sleep(1)
                        for one in hostile:
                            one.drop()
                        await self.progress()
                        await nothing_left(pool.network, NODE.peer_id)
                except* ConfigurationError:
                    pass  # a final no of the coordinator ends a node in words, as it should
                nursery.cancel_scope.cancel()

    async def progress(self) -> None:
        """With honest peers again, new work is done and handed in."""
        pool = self.pool
        before = len(pool.received)
        await pool.publish(1)
        pool.work += 2
        with trio.move_on_after(PROGRESS_SECONDS):
            while len(pool.received) <= before:  # noqa: ASYNC110 - the other side has no event to wait on
                await trio.sleep(5)
            return
        raise Defect("the node does no work any more")


def _address(who: Identity) -> PeerAddress:
    return PeerAddress(peer=who.peer_id, addresses=(f"/memory/{who.peer_id}",))


def play(case: Case) -> None:
    """Raise Defect, or whatever the node raised, if it did not bear the case."""
    with no_exception_logged():
        run_virtual(Stage().play, case)


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
                    "node_state": ["active", "suspended", "banned"],
                    "run_state": ["running", "paused", "stopped"],
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
                }

    found: Pools = run_virtual(learn)
    return found


@st.composite
def sign(draw: Any, kind: type[Message], body: dict[str, Any]) -> dict[str, Any]:
    """Signed fields by the coordinator, mostly, and manifests as published; else by somebody, or of nothing."""
    for name in body:
        if (kind.TYPE, name) in SIGNED_RECORDS:
            label, record = SIGNED_RECORDS[kind.TYPE, name]
            how = draw(st.sampled_from(["own"] * 6 + ["other", "label", "junk"]))
            if how == "junk" or (how == "own" and name in pools() and draw(st.booleans())):
                continue
            signer = COORDINATOR if how == "own" and label != "manifest" else STRANGER
            body[name] = signed(signer, "run" if how == "label" else label, draw(records(record, pools())))
    return body


@st.composite
def steps(draw: Any) -> Step:
    role = draw(st.sampled_from(["coordinator"] * 5 + ["learner", "peer", "stranger"]))
    kinds = REPLIES if role == "coordinator" else {"chunks": wire.Chunk if role == "learner" else wire.ChunkRequest}
    protocol = draw(st.sampled_from(sorted(kinds)))
    data = draw(requests(kinds[protocol], pools(), sign))
    return Step(role, protocol, data, draw(st.sampled_from(["read", "read", "read", "reset", "silent"])))


def cases() -> st.SearchStrategy[Case]:
    """Replies and requests in any order."""
    return st.lists(steps(), min_size=1, max_size=12).map(lambda found: Case(NAME, tuple(found)))
