"""Appeals and statements over the wire, and the operator's side of them."""

from __future__ import annotations

from contextlib import closing

import pytest

from echo2.coordinator import accounts, history
from echo2.coordinator.appeals import OPEN_MAX
from echo2.coordinator.ledger import open_ledger
from echo2.p2p.errors import Refused
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import AppealReply, AppealRequest, StatementReply, StatementRequest
from echo2.p2p.postings import POSTINGS_MAX, Statement, check_statement


def appeal(number, subject="suspension", text="the answer was right"):
    return AppealRequest(run="r1", appeal_id=number.to_bytes(16), subject=subject, text=text)


async def send(node, *arguments, **words):
    return await node.ask("appeal", appeal(*arguments, **words), AppealReply)


async def begin(learner, *nodes):
    await learner.hello()
    await learner.publish()
    for node in nodes:
        await node.join()


async def statement(node, after=0):
    reply = await node.ask("statement", StatementRequest(run="r1", after=after), StatementReply)
    return open_signed(reply.statement, node.world.coordinator.peer_id, "statement", Statement), reply.more


async def test_an_appeal_is_kept_and_answered(autojump_clock, world):
    """Sent twice it is one; the operator's answer and the adjustment are told, over a restart; the log has it all."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving() as service:
            await begin(learner, node)
            (lease, *_) = await node.work()
            assert (await send(node, 1, lease.lease_id.hex(), text="it was right \0")).state == "open"
            assert (await send(node, 1, lease.lease_id.hex(), text="other words")).state == "open"
            (view,) = service.appeals_view()
            assert (view.subject, view.text, view.state) == (lease.lease_id.hex(), "it was right \ufffd", "open")
        async with world.serving() as service:
            await node.hello()
            answered = service.resolve_appeal(1, True, actor="op", reason="so it was", amount_micros=250_000)
            assert (answered.state, answered.answer) == ("upheld", "so it was")
            reply = await send(node, 1, lease.lease_id.hex())
            assert (reply.state, reply.answer, reply.posting) == ("upheld", "so it was", answered.posting)
            with pytest.raises(Refused, match="upheld already"):
                service.resolve_appeal(1, True, actor="op", reason="again", amount_micros=250_000)
            with pytest.raises(KeyError):
                service.resolve_appeal(2, False, actor="op", reason="what?")
            said, _ = await statement(node)
            posting = said.postings[-1]
            assert (posting.kind, posting.unit, posting.amount_micros) == ("adjustment", "usd", 250_000)
            assert posting.reason == "appeal 1: so it was"
            assert service.nodes_view()[0].balance_dollars == 0.25
    with closing(open_ledger(world.url)) as ledger, ledger.reading() as connection:
        assert history.replay(history.read_bodies(connection)) == history.read_state(connection)
        assert accounts.verify(connection).fault == ""


async def test_a_flood_of_appeals_is_bounded(autojump_clock, world):
    """So many are open of one key; what is sent again of them still is answered; an answer makes room for the next."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await begin(learner, node, other)
        service.suspend_node(node.peer_id, actor="op", reason="odd rewards")
        for number in range(OPEN_MAX):
            await send(node, number, text="x" * 1024)
        for number in range(OPEN_MAX, OPEN_MAX + 20):
            with pytest.raises(Refused, match="wait for an answer") as refused:
                await send(node, number)
            assert refused.value.retry_seconds
        assert (await send(node, 0)).state == "open"
        assert len(service.appeals_view()) == OPEN_MAX
        service.resolve_appeal(1, False, actor="op", reason="no")
        assert (await send(node, OPEN_MAX)).state == "open"
        assert [view.state for view in service.appeals_view()] == ["open"] * OPEN_MAX + ["refused"]


async def test_what_is_not_ones_own_cannot_be_appealed(autojump_clock, world):
    """Another node's lease, one that never was, a suspension that is none: said for good, and nothing is recorded."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await begin(learner, node, other)
        (lease, *_) = await node.work()
        for asker, subject in ((other, lease.lease_id.hex()), (node, "0" * 32), (node, "suspension")):
            with pytest.raises(Refused) as refused:
                await send(asker, 1, subject)
            assert refused.value.retry_seconds is None
        assert service.appeals_view() == []


async def test_an_amount_that_cannot_be_posted_is_refused(autojump_clock, world):
    """With a refusal, or beyond what a posting holds: the appeal stays open."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node:
        await begin(learner, node)
        service.suspend_node(node.peer_id, actor="op", reason="odd")
        await send(node, 1)
        for upheld, amount in ((False, 1), (True, 2**60)):
            with pytest.raises(Refused):
                service.resolve_appeal(1, upheld, actor="op", reason="x", amount_micros=amount)
        assert service.appeals_view()[0].state == "open"


async def test_a_statement_comes_in_pages_that_check(autojump_clock, world):
    """Each within its bounds, of nobody else's postings, with the chain's end."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await begin(learner, node, other)
        entry = accounts.Entry("r1", node.peer_id, "adjustment", "usd", 1, 0, "op", "ä" * 512)
        with service._office.ledger.transaction() as connection:
            accounts.append(connection, [entry] * (POSTINGS_MAX + 2000), wall=1.0)
        after, count, more, pages = 0, 0, True, 0
        while more:
            said, more = await statement(node, after)
            assert check_statement(said) == ""
            assert said.after == after
            count, after, pages = count + len(said.postings), said.postings[-1].id, pages + 1
        assert (count, pages > 4) == (POSTINGS_MAX + 2000, True)
        assert (await statement(other))[0].postings == ()
