"""Whatever a reply names as a time to wait, the node asks again within a bound."""

from __future__ import annotations

import pytest
import trio

from echo2.node.membership import HEARTBEAT_SECONDS_MAX
from echo2.p2p.errors import RETRY_SECONDS_MAX, Refused
from echo2.p2p.messages import LeaseReply

FOR_EVER_SECONDS, NO_TIME_SECONDS = 1e9, 5e-324
LEASE_SECONDS = 1800.0

SLACK = 1.5
"""Back-off and jitter come on top of a bound."""

SELDOM = {"status_seconds": 300.0}
"""Virtual hours with a status each second would take real ones."""


async def test_a_hello_refused_for_thirty_years_is_said_again(autojump_clock, pool):
    """The coordinator changes its mind, and the node is in within the bound."""
    pool.hello_refusal = Refused("busy", "come again", FOR_EVER_SECONDS)
    async with pool.node(**SELDOM) as service:
        await trio.sleep(1)
        pool.hello_refusal = None
        await trio.sleep(SLACK * RETRY_SECONDS_MAX)
        assert service.situation.facts.joined


@pytest.mark.parametrize("how", ["reply", "refusal"])
async def test_no_word_about_leases_stops_the_asking(autojump_clock, pool, how):
    """An empty reply or a refusal that says to come back in thirty years is asked again within the bound."""
    await pool.publish(0)

    async def never(peer, request):
        pool.asked.append(request)
        if how == "refusal":
            raise Refused("busy", "come again", FOR_EVER_SECONDS)
        return LeaseReply(leases=(), retry_seconds=FOR_EVER_SECONDS, reason="come again")

    pool.instead["leases"] = never
    async with pool.node(**SELDOM):
        await trio.sleep(10)
        asked = len(pool.asked)
        assert asked
        await trio.sleep(SLACK * RETRY_SECONDS_MAX)
        assert len(pool.asked) > asked


@pytest.mark.parametrize("protocol", ["manifest", "rollouts", "receipts", "heartbeat"])
async def test_no_refusal_of_any_request_stops_the_asking(autojump_clock, pool, protocol):
    """Snapshots, submissions, receipts and heartbeats are tried again within the bound as well."""
    refused_at = []

    async def never(peer, request):
        refused_at.append(trio.current_time())
        raise Refused("busy", "come again", FOR_EVER_SECONDS)

    pool.work = 100
    await pool.publish(0)
    if protocol != "manifest":
        async with pool.node(**SELDOM):
            await trio.sleep(10)
    pool.instead[protocol] = never
    pool.work = 100
    async with pool.node(**SELDOM):
        await trio.sleep(30)
        seen = len(refused_at)
        assert seen
        await trio.sleep(SLACK * RETRY_SECONDS_MAX)
        assert len(refused_at) > seen


async def test_the_coordinators_heartbeat_time_is_bounded_here(autojump_clock, pool):
    """A coordinator that names an hour gets its heartbeats by the minute: each is also the node's ear."""
    usual = pool._hello

    async def slow(peer, hello):
        welcome = await usual(peer, hello)
        return welcome.model_copy(update={"heartbeat_seconds": 3600.0})

    pool.instead["hello"] = slow
    async with pool.node(**SELDOM):
        await trio.sleep(10 * HEARTBEAT_SECONDS_MAX)
        assert len(pool.beats) >= 9
        assert all(body.hold_seconds <= HEARTBEAT_SECONDS_MAX for _, body in pool.beats)


async def test_a_lease_without_end_does_not_hold_the_node_to_it(autojump_clock, pool, monkeypatch):
    """What cannot be generated is given up after the node's own bound, however long its lease is said to last."""
    monkeypatch.setattr("echo2.node.work.LEASE_SECONDS_MAX", LEASE_SECONDS)
    pool.lease_seconds = FOR_EVER_SECONDS
    pool.work = 1
    pool.engine.failures = 10**6
    await pool.publish(0)
    async with pool.node(**SELDOM) as service:
        await trio.sleep(60)
        assert service.status.leases_held
        await trio.sleep(LEASE_SECONDS + 300)
        assert not service.status.leases_held


@pytest.mark.parametrize("protocol", ["hello", "manifest", "rollouts", "receipts", "leases", "heartbeat"])
async def test_no_refusal_makes_the_node_ask_without_a_pause(autojump_clock, pool, protocol):
    """One that says to come again in no time at all is obeyed a few times a second at the most."""
    asked_at = []

    async def at_once(peer, request):
        asked_at.append(trio.current_time())
        assert len(asked_at) < 400, "it asks and asks"
        raise Refused("busy", "come again", NO_TIME_SECONDS)

    await pool.publish(0)
    pool.work = 4
    pool.instead[protocol] = at_once
    async with pool.node():
        await trio.sleep(30)
    assert 3 <= len(asked_at) <= 150


async def test_a_welcome_that_orders_heartbeats_without_a_pause_is_not_obeyed(autojump_clock, pool):
    """Though each is answered at once, there are at most four a second."""
    usual = pool._hello

    async def without_pause(peer, hello):
        welcome = await usual(peer, hello)
        return welcome.model_copy(update={"heartbeat_seconds": NO_TIME_SECONDS})

    pool.instead["hello"] = without_pause
    await pool.publish(0)
    async with pool.node():
        await trio.sleep(30)
        assert len(pool.beats) < 4 * 30 + 10
