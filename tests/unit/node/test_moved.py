"""A node whose join string leaves the run to the coordinator, and a coordinator with more than one."""

from __future__ import annotations

import dataclasses

import pytest
import trio

from echo2.node.spool import Spool
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.p2p.join import ANY_RUN, parse_join_string

from .conftest import COORDINATOR, RUN

SECOND = "second"
TOKEN = "0123456789abcdef0123456789abcdef0123"


@pytest.fixture
def anywhere(pool):
    """The pool, with a join string for whichever run the coordinator says."""
    pool.join = dataclasses.replace(pool.join, run=ANY_RUN)
    return pool


async def until(holds, seconds=120.0):
    """Wait for a condition of the outside, in virtual time."""
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - the outside has no event to wait on
            await trio.sleep(0.05)


async def move(pool, run=SECOND):
    """The operator's decision; the heartbeats in hand hear of it."""
    pool.run = run
    pool.news.set()
    pool.news = trio.Event()


def test_a_join_string_may_leave_the_run_to_the_coordinator():
    """A star in the run's place is read, written and means any run; a name means that one."""
    text = f"echo2://{COORDINATOR.peer_id}@127.0.0.1:4001/*?token={TOKEN}"
    assert str(parse_join_string(text)) == text
    assert parse_join_string(text).run_wanted is None
    assert parse_join_string(text.replace("*", "x")).run_wanted == "x"


async def test_a_node_goes_where_its_coordinator_says(autojump_clock, anywhere):
    """It hands in what it held of the first run, installs the second's snapshot and works for it, though older."""
    pool = anywhere
    await pool.publish(7)
    pool.work = 4
    async with pool.node() as node:
        await until(lambda: pool.handed_in.get(RUN) == 4)
        assert [hello.run for hello in pool.hellos] == [None]
        pool.run = SECOND
        await pool.publish(2)
        pool.work = 3
        await until(lambda: pool.handed_in == {RUN: 4, SECOND: 3} and node.status.receipts == {"consumed": 14})
        status = node.status
    assert (status.run, status.version, status.installs) == (SECOND, 2, 2)
    assert {snapshot.manifest.run for snapshot in pool.store.snapshots()} == {SECOND}


async def test_what_was_spooled_for_a_run_is_handed_in_after_a_restart_in_another(autojump_clock, anywhere):
    """A slice that could not be sent before the end of the process goes to its own run, and its receipt comes back."""
    pool = anywhere
    await pool.publish(0)
    pool.work = 2

    async def not_now(peer, request):
        raise Refused("full", "not now", retry_seconds=5.0)

    pool.instead["rollouts"] = not_now
    async with pool.node() as node:
        await until(lambda: node.status.spooled == 4)
    del pool.instead["rollouts"]
    pool.run = SECOND
    async with pool.node() as node:
        await until(lambda: node.status.spooled == 0 and node.status.receipts == {"consumed": 4})
    assert pool.handed_in == {RUN: 2}


async def test_a_run_that_takes_nothing_does_not_keep_another_waiting(autojump_clock, anywhere):
    """Slices of a run that the coordinator has given up stay spooled; those of the run it works for are handed in."""
    pool = anywhere
    await pool.publish(0)
    pool.work = 2
    usual = pool._submit

    async def only_second(peer, request):
        if request.run == RUN:
            raise Refused("unknown_run", "no such run", retry_seconds=30.0)
        return await usual(peer, request)

    pool.instead["rollouts"] = only_second
    async with pool.node() as node:
        await until(lambda: node.status.spooled == 4)
        pool.run = SECOND
        await pool.publish(0)
        pool.work = 5
        await until(lambda: pool.handed_in == {SECOND: 5})
        assert node.status.spooled == 4


async def test_a_node_for_one_run_is_not_moved(autojump_clock, pool):
    """Its join string names a run: a coordinator that answers with another is told no, in words, and the node ends."""
    await pool.publish(0)
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigurationError, match="the join string is for 'demo'")):
        async with pool.node() as node:
            await until(lambda: node.status.version == 0)
            await move(pool)
            await trio.sleep(60)
    assert pool.hellos[0].run == RUN


def test_the_runs_of_a_coordinator_are_remembered(tmp_path):
    """Over a restart, and apart from another coordinator's; a run that changed hands is the last one's."""
    spool = Spool(tmp_path / "spool.sqlite")
    spool.join("a", "one")
    spool.join("b", "one")
    spool.join("c", "two")
    spool.join("b", "two")
    spool.close()
    again = Spool(tmp_path / "spool.sqlite")
    assert (again.joined("one"), again.joined("two")) == (("a",), ("b", "c"))
    again.close()
