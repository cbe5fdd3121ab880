"""A refusal keeps the learner waiting for no longer than a bound, and stays on show until it is over."""

from __future__ import annotations

import random

import pytest
import trio

from echo2.learner.link import CoordinatorLink
from echo2.p2p.channel import answering
from echo2.p2p.errors import RETRY_SECONDS_MAX, Refused
from echo2.p2p.identity import Identity
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import Ack, Hello, LearnerReport, PeerAddress

COORDINATOR, LEARNER = Identity(b"c" * 32), Identity(b"l" * 32)
REPORT = LearnerReport(run="demo", epoch=0, version=0, finished=(), steps=(), status="")


@pytest.mark.parametrize("how", ["first hello", "ask"])
async def test_a_refusal_for_thirty_years_is_asked_again(autojump_clock, how):
    """At the first hello and in any later request."""
    asked = []

    async def never(peer, message):
        asked.append(trio.current_time())
        raise Refused("busy", "come again", 1e9)

    network = MemoryNetwork(random.Random(0), delay_seconds=0.01)
    async with network.transport(COORDINATOR) as coordinator, network.transport(LEARNER) as learner:
        for protocol, kind in (("hello", Hello), ("report", LearnerReport)):
            coordinator.set_handler(protocol, answering(kind, never, lambda *_: None))
        where = PeerAddress(peer=COORDINATOR.peer_id, addresses=("anywhere",))
        link = CoordinatorLink(learner, where, "demo", "learner")
        with trio.move_on_after(3 * RETRY_SECONDS_MAX):
            if how == "ask":
                await link.ask("report", REPORT, Ack)
            else:
                await link.first_hello(lambda _: None)
        assert len(asked) >= 3


async def test_what_was_said_last_stays_on_show_while_the_coordinator_is_unreachable(autojump_clock):
    """A coordinator that closes the door tells nothing; what it said before it did is why."""

    async def busy(peer, message):
        raise Refused("busy", "the ledger takes nothing", 1.0)

    network = MemoryNetwork(random.Random(0), delay_seconds=0.01)
    async with network.transport(LEARNER) as learner, trio.open_nursery() as nursery:
        where = PeerAddress(peer=COORDINATOR.peer_id, addresses=("anywhere",))
        link = CoordinatorLink(learner, where, "demo", "learner")
        nursery.start_soon(link.first_hello, lambda _: None)
        async with network.transport(COORDINATOR) as coordinator:
            coordinator.set_handler("hello", answering(Hello, busy, lambda *_: None))
            await trio.sleep(60)
            assert "the ledger takes nothing" in link.trouble["hello"]
        await trio.sleep(60)
        assert link.trouble["hello"].endswith("it said last: the ledger takes nothing")
        nursery.cancel_scope.cancel()
