"""Many nodes that wait for work: one commit for all, none twice, and a ledger that fails takes nothing away."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import sqlalchemy as sa
import trio

from echo2.coordinator import lease_desk, schema
from echo2.coordinator.ledger import LedgerUnavailable
from echo2.coordinator.slots import ATTEMPTS_MAX
from echo2.p2p.errors import Refused

NODES = 6


async def begun(world, stack, nodes=NODES):
    """A run past its baseline, and nodes that hold nothing."""
    learner = await stack.enter_async_context(world.learner())
    await learner.hello()
    await learner.publish()
    pool = [await stack.enter_async_context(world.node(10 + number)) for number in range(nodes)]
    for node in pool:
        await node.join()
    while not any(each.complete for each in world.run.evaluations):
        await pool[0].work(wait=1.0)
        await trio.sleep(0.1)
    return learner, pool


def slots(leases):
    return {(lease.ordinal, sample) for lease in leases for sample in range(lease.sample_first, lease.sample_first + 2)}


async def ask_all(pool, wait, samples=2):
    replies = {}

    async def ask(node):
        replies[node] = await node.lease(samples, wait)

    async with trio.open_nursery() as nursery:
        for node in pool:
            nursery.start_soon(ask, node)
    return [replies[node] for node in pool]


async def test_nodes_that_wait_are_all_given_work_by_one_commit(autojump_clock, world):
    """A pause keeps them waiting; when the run goes on each has other samples, in one event of the ledger."""
    async with world.serving() as service, AsyncExitStack() as stack:
        _, pool = await begun(world, stack)
        service.pause_run("r1", actor="operator", reason="test")
        replies = []

        async def ask():
            replies.extend(await ask_all(pool, 20.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(5.0)
            assert not replies
            before = grants(service)
            service.resume_run("r1", actor="operator", reason="test")
        found = [slots(reply.leases) for reply in replies]
        assert all(len(mine) == 2 for mine in found)
        assert len(set.union(*found)) == 2 * NODES
        assert grants(service) == before + 1


def grants(service):
    with service._office.ledger.reading() as connection:
        table = schema.events
        query = sa.select(sa.func.count()).select_from(table).where(table.c.action == "leases granted")
        return connection.scalar(query)


async def test_a_crowd_is_served_in_several_deals(autojump_clock, world, monkeypatch):
    """More of them than one deal takes: nobody is forgotten until the next thing happens."""
    monkeypatch.setattr(lease_desk, "GRANTS_MAX", 2)
    async with world.serving() as service, AsyncExitStack() as stack:
        _, pool = await begun(world, stack)
        service.pause_run("r1", actor="operator", reason="test")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_and_check, pool)
            await trio.sleep(5.0)
            before = trio.current_time()
            service.resume_run("r1", actor="operator", reason="test")
        assert trio.current_time() - before < 1.0


async def ask_and_check(pool):
    assert all(reply.leases for reply in await ask_all(pool, 20.0))


async def test_whoever_finds_nothing_is_told_why(autojump_clock, world):
    """At once when it does not wait, and at the end of its wait when it does."""
    async with world.serving() as service, AsyncExitStack() as stack:
        _, pool = await begun(world, stack)
        service.pause_run("r1", actor="operator", reason="lunch")
        for wait in (0.0, 3.0):
            before = trio.current_time()
            replies = await ask_all(pool, wait)
            assert {reply.reason for reply in replies} == {"the run is paused: lunch"}
            assert trio.current_time() - before == pytest.approx(wait, abs=1.0)


async def test_a_ledger_that_fails_takes_back_what_was_dealt(autojump_clock, world, monkeypatch):
    """However often it fails, nothing counts as given, and afterwards the same slots go out."""
    async with world.serving() as service, AsyncExitStack() as stack:
        _, pool = await begun(world, stack)
        ledger, book = service._office.ledger, service._office.run.leases
        whole, next_slot = ledger.transaction, (book.train.next_ordinal, book.train.next_sample)

        def full():
            ledger.trouble = "full"
            raise LedgerUnavailable("full")

        monkeypatch.setattr(ledger, "transaction", full)
        known = set(book.leases)
        for _ in range(ATTEMPTS_MAX + 1):
            with pytest.raises(Refused) as refused:
                await pool[0].lease(2)
            assert refused.value.code == "ledger_unavailable"
        assert (set(book.leases), book.train.leased, book.train.abandoned) == (known, 0, 0)
        monkeypatch.setattr(ledger, "transaction", whole)
        (lease,) = (await pool[0].lease(2)).leases
        assert (lease.ordinal, lease.sample_first) == next_slot
        assert book.train.open == 0


async def test_nobody_waits_for_work_under_a_snapshot_that_another_has_followed(autojump_clock, world):
    """Paced under version 0: answered when version 2 is published, long before the end of the wait."""
    async with world.serving() as service, AsyncExitStack() as stack:
        learner, pool = await begun(world, stack, nodes=1)
        (node,) = pool
        replies = []

        async def ask():
            while not replies or replies[-1].leases:
                replies.append(await node.lease(2, 20.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(5.0)
            before = trio.current_time()
            await learner.publish(version=2)
        assert trio.current_time() - before < 1.0
        assert replies[-1].reason
        assert service.run_view("r1").version == 2
