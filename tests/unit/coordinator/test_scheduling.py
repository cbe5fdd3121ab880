"""The scheduler in the coordinator: who is given leases, what is recorded, and that volunteers notice nothing."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from echo2.coordinator.ledger import LedgerUnavailable
from echo2.coordinator.node_states import Standing
from echo2.coordinator.pool import NodeEntry, Pool
from echo2.p2p.identity import Identity

pytestmark = pytest.mark.slow_on_postgresql

CHEAP, DEAR, FREE = 10, 11, 12


def peer_id(number):
    return Identity(number.to_bytes(32)).peer_id


def priced(world, **rules):
    prices = {peer_id(CHEAP): 0.1, peer_id(DEAR): 0.5}
    world.activation = {"prices": prices, "period_seconds": 60.0, **rules}


@asynccontextmanager
async def pool_of(world, *keys):
    """The service of a run whose first snapshot is published, and nodes of these keys, joined in this order."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(world.serving())
        learner = await stack.enter_async_context(world.learner())
        nodes = [await stack.enter_async_context(world.node(key)) for key in keys]
        await learner.hello()
        await learner.publish()
        for node in nodes:
            await node.join()
        yield service, *nodes


async def beat(*nodes, seconds):
    """Time passes, and these nodes are heard of."""
    for _ in range(int(seconds / 10)):
        await trio.sleep(10)
        for node in nodes:
            await node.heartbeat()


def said(service):
    return [(event.actor, event.action, event.subject) for event in service.events_view() if event.actor == "scheduler"]


async def test_the_cheaper_node_works_and_the_other_stands_by(autojump_clock, world):
    """Before anything is measured one node is tried; the other one is told why it gets nothing."""
    priced(world)
    async with pool_of(world, DEAR, CHEAP) as (service, dear, cheap):
        await beat(cheap, dear, seconds=20)
        views = {view.peer: view for view in service.nodes_view()}
        assert not views[cheap.peer_id].standby
        assert (await cheap.lease()).leases
        reply = await dear.lease()
        assert reply.leases == ()
        assert reply.reason.startswith("standing by: the pool makes enough")
        assert (views[dear.peer_id].standby, views[dear.peer_id].price_hour) == (True, 0.5)


async def test_when_it_is_lost_the_one_standing_by_takes_its_place(autojump_clock, world):
    """And both decisions are on record with their numbers: the audit log in words, the newest ones whole."""
    priced(world)
    async with (
        world.serving() as service,
        world.learner() as learner,
        world.node(CHEAP) as cheap,
        world.node(DEAR) as dear,
    ):
        await learner.hello()
        await learner.publish()
        await cheap.join()
        await beat(cheap, seconds=20)
        await dear.join()
        await beat(dear, seconds=60)  # three heartbeats of the other are missed
        assert (await dear.lease()).leases
        assert said(service) == [
            ("scheduler", "node released", cheap.peer_id),
            ("scheduler", "node activated", dear.peer_id),
            ("scheduler", "node activated", cheap.peer_id),
        ]
        newest = service.decisions_view()[0]
        assert (newest["action"], newest["cause"], newest["chosen"]) == ("activate", "unmeasured", (dear.peer_id,))
        assert newest["considered"][0]["price"] == 500_000
        assert newest["lapsed"] == (cheap.peer_id,)


async def test_a_pool_of_volunteers_has_nothing_to_decide(autojump_clock, world):
    """They work from their first hello, and the audit log has no line about it."""
    priced(world)
    async with world.serving() as service, world.learner() as learner, world.node(FREE) as free:
        await learner.hello()
        await learner.publish()
        await free.join()
        await beat(free, seconds=120)
        assert (await free.lease()).leases
        assert said(service) == []
        assert service.decisions_view() == []


async def test_volunteers_come_before_a_paid_node(autojump_clock, world):
    """The paid node waits a period for the volunteer to be measured; a mean while nobody is without work."""
    priced(world)
    async with pool_of(world, FREE, CHEAP) as (service, free, cheap):
        await beat(free, cheap, seconds=30)
        assert (await free.lease()).leases
        assert (await cheap.lease()).leases == ()
        assert said(service)[-1] == ("scheduler", "node activated", free.peer_id)


async def test_nothing_is_done_that_could_not_be_recorded(autojump_clock, world, monkeypatch):
    """While the ledger refuses, the pool stays as it is; afterwards the same is decided again."""
    priced(world)
    async with world.serving() as service, world.learner() as learner, world.node(CHEAP) as cheap:
        await learner.hello()
        await learner.publish()
        await cheap.join()

        def refuse(*_args, **_values):
            raise LedgerUnavailable("disk full")

        with monkeypatch.context() as patch:
            patch.setattr("echo2.coordinator.scheduling.add_event", refuse)
            await beat(cheap, seconds=30)
            assert service.nodes_view()[0].standby
            assert service.decisions_view() == []
        await beat(cheap, seconds=20)
        assert not service.nodes_view()[0].standby


async def test_when_the_run_is_over_paid_nodes_stand_by(autojump_clock, world):
    """It is not the loop that changed its mind."""
    priced(world)
    async with world.serving() as service, world.learner() as learner, world.node(CHEAP) as cheap:
        await learner.hello()
        await learner.publish()
        await cheap.join()
        await beat(cheap, seconds=20)
        assert not service.nodes_view()[0].standby
        service.stop_run("r1", actor="operator", reason="enough")
        await beat(cheap, seconds=20)
        assert service.nodes_view()[0].standby
        assert said(service)[0] == ("scheduler", "node released", cheap.peer_id)


def test_rules_from_settings(world):
    """Money in micro-dollars; what is not set is no bound."""
    priced(world, price_ceiling_hour=0.25, gamma=1.2, order="shuffle", shuffle_seed=3)
    rules = world.config().activation.rules()
    assert (rules.price_ceiling, rules.spend_ceiling, rules.gamma, rules.nocost_seed) == (250_000, None, 1.2, 3)
    assert world.config().activation.price(peer_id(CHEAP)) == 100_000
    assert world.config().activation.price(peer_id(FREE)) == 0


def test_a_price_for_something_that_is_no_node_is_refused(world):
    """A peer id that is cut short, or an amount below 0."""
    for prices in ({"node-1": 0.1}, {peer_id(CHEAP): -0.1}):
        world.activation = {"prices": prices}
        with pytest.raises(ValueError, match="prices"):
            world.config()


async def test_a_restart_of_the_coordinator_sends_nobody_home(autojump_clock, world):
    """Who worked goes on at once, though nothing that was measured of it is known any more; who stood by still does."""
    priced(world)
    async with world.learner() as learner, world.node(CHEAP) as cheap, world.node(DEAR) as dear:
        async with world.serving():
            await learner.hello()
            await learner.publish()
            await cheap.join()
            await dear.join()
            await beat(cheap, dear, seconds=20)
        async with world.serving() as service:
            await learner.hello()
            await learner.publish()
            await cheap.join(hello=False)
            await dear.join(hello=False)
            assert (await cheap.lease()).leases
            assert (await dear.lease()).leases == ()
            await beat(cheap, dear, seconds=30)
            assert [line for line in said(service) if line[1].startswith("node")] == [
                ("scheduler", "node activated", cheap.peer_id)
            ]


async def test_a_restart_forgets_neither_decisions_nor_holds(autojump_clock, world):
    """They are read from the audit log: words, causes and moments; and how long ago each mind was changed."""
    priced(world)
    async with world.learner() as learner, world.node(CHEAP) as cheap, world.node(DEAR) as dear:
        async with world.serving() as service:
            await learner.hello()
            await learner.publish()
            await cheap.join()
            await dear.join()
            await beat(cheap, dear, seconds=20)
            before = service.decisions_view()
            changed_at = service._scheduler._state.changed[cheap.peer_id]
        await trio.sleep(100)
        async with world.serving() as service:
            after = service.decisions_view()[-len(before) :]  # behind what the first look of this one says
            assert service._scheduler._state.changed == {cheap.peer_id: pytest.approx(changed_at, abs=0.01)}
        assert len(after) == len(before) >= 1
        for old, new in zip(before, after, strict=True):
            assert new.pop("wall_seconds") == pytest.approx(old["wall_seconds"], abs=0.01)
            assert new.pop("chosen") == list(old["chosen"])
            assert new == {key: old[key] for key in ("run", "action", "cause", "reason")}
        await trio.sleep(600)
        async with world.serving() as service:
            assert service._scheduler._state.changed == {}
            assert set(service._scheduler._state.assigned) == {cheap.peer_id}


async def test_the_pool_shows_who_stands_by_and_what_it_aims_at(autojump_clock, world):
    """Counted apart from the healthy ones, whose rate is the pool's."""
    priced(world, gamma=1.5)
    async with world.serving() as service, world.learner() as learner, world.node(DEAR) as dear:
        await learner.hello()
        await dear.join()
        pool = service.pool_view()
        assert (pool.nodes_healthy, pool.nodes_standby, pool.mu_target) == (0, 1, None)
        assert "1 live nodes, all of them standing by" in service._office.pool.nobody(trio.current_time())


def test_who_stands_by_counts_for_no_rate():
    """It may be measured, and live; mu_pool is of those that work."""
    pool = Pool(10.0)
    for name, standby in (("works", False), ("waits", True)):
        node = pool.nodes[name] = NodeEntry(
            name, name, "", (), seen_at=0.0, says="working", standing=Standing("standby" if standby else "active")
        )
        node.meter.believe(2.0, 0.0)
    assert pool.mu(1.0) == 2.0
    assert [node.peer for node in pool.live(1.0)] == ["works", "waits"]
    assert [node.peer for node in pool.working(1.0)] == ["works"]
