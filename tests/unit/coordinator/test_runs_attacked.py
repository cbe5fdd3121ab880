"""Several runs in one coordinator against nodes and researchers that mean no good, or have bad luck."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import sqlalchemy as sa
import trio

from echo2.coordinator import admission, schema
from echo2.coordinator.config import CoordinatorConfig
from echo2.p2p.errors import Refused
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import RunDescriptor

SECOND = 3
"""The key of the second run's learner."""


@pytest.fixture
def pool(world, tools):
    """A world with the runs r1 and r2."""

    def config(runs=("r1", "r2")):
        one = tools.world.config(world)
        learners = {"r1": one.run.learner, "r2": tools.identity(SECOND).peer_id}
        named = tuple(one.run.model_copy(update={"name": run, "learner": learners[run]}) for run in runs)
        return CoordinatorConfig(**one.model_dump(exclude={"run", "runs"}) | {"runs": named})

    world.config = config
    return world


async def hello(world, node, token=""):
    """Hello, as a node that goes where it is told."""
    welcome = await node.hello(token, session=node.session)
    node.run = open_signed(welcome.descriptor, world.coordinator.peer_id, "run", RunDescriptor).run
    return node.run


async def begin(stack, world):
    """Both runs are published."""
    learners = []
    for run, number in (("r1", 2), ("r2", SECOND)):
        learner = await stack.enter_async_context(world.learner(number))
        learner.run = run
        await learner.hello()
        await learner.publish()
        learners.append(learner)
    return learners


async def join(stack, world, number, run=None, price=0):
    """A node that takes part in `run`, or in any."""
    node = await stack.enter_async_context(world.node(number))
    node.wanted, node.price = run, price
    await hello(world, node, world.token())
    await node.join(hello=False)
    return node


async def go(world, node, run):
    """The node moves by its own word."""
    node.wanted = run
    await hello(world, node)
    await node.join(hello=False)


async def past_the_baseline(world, node):
    """The run of this node trains."""
    while not world.service.run_view(node.run).evaluations[0].complete:
        await node.work(wait=1.0)
        await trio.sleep(0.1)


async def test_a_run_is_not_created_with_a_nodes_key_for_its_learner(autojump_clock, pool, tools):
    """Its owner's node would be locked out, and what it has with us would belong to nobody."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(stack, pool)
        node = await join(stack, pool, 10, "r1")
        third = pool.config().run.model_copy(update={"name": "r3", "learner": node.peer_id})
        with pytest.raises(Refused) as refused:
            await service.create_run(third, actor="operator", reason="test")
        assert refused.value.code == "learner_is_a_node"
        await hello(pool, node)


async def test_a_key_that_was_a_learners_may_be_a_nodes_later(autojump_clock, pool):
    """Its run is gone from the settings: it is let in as any new node is."""
    two = pool.config
    async with pool.serving(), AsyncExitStack() as stack:
        await begin(stack, pool)
    pool.config = lambda: two(["r1"])
    async with pool.serving(), AsyncExitStack() as stack:
        node = await join(stack, pool, SECOND)
        assert node.run == "r1"
    async with pool.serving() as service:
        assert service.node_view(node.peer_id).run == "r1"


async def test_what_a_node_held_before_it_moved_does_not_make_it_fast(autojump_clock, pool, tools):
    """Leases taken before it left the run and came back count neither as rollouts nor as time of its rate."""
    pool.run_settings = {"n": 8, "R": 64, "lease_seconds": 600.0}
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(stack, pool)
        node = await join(stack, pool, 10, "r1")
        await past_the_baseline(pool, node)
        leases = (await node.lease()).leases
        assert sum(lease.sample_count for lease in leases) == 8
        await trio.sleep(30.0)
        await go(pool, node, "r2")
        await go(pool, node, "r1")
        await node.submit(*map(tools.answer, leases))
        entry = service._office.pool.nodes[node.peer_id]
        assert entry.meter.rate(trio.current_time()) is None
        (lease, *_) = (await node.lease(samples=2)).leases
        await trio.sleep(20.0)
        await node.submit(tools.answer(lease))
        assert entry.meter.rate(trio.current_time()) == pytest.approx(2 / 20, rel=0.1)


async def test_an_account_outlives_the_memory_of_its_node(autojump_clock, pool, monkeypatch):
    """A paid node that fell silent is crowded out by newer keys; the clock of its account goes on, and a restart."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(stack, pool)
        node = await join(stack, pool, 10, "r1", price=360_000)
        await trio.sleep(15.0)
        await node.heartbeat()
        assert service.node_view(node.peer_id).state == "active"
        await trio.sleep(60.0)
        for module in (admission, __import__("echo2.coordinator.loading", fromlist=["x"])):
            monkeypatch.setattr(module, "KNOWN_MAX", 3)
        monkeypatch.setattr(admission, "KNOWN_SPARE", 1)
        for number in range(20, 26):
            await join(stack, pool, number, "r1")
        await trio.sleep(200.0)
        assert service._office.payroll.engaged
    async with pool.serving() as service:
        await trio.sleep(100.0)
        assert service.run_view("r1").state == "running"


async def test_a_token_of_a_run_that_is_gone_lets_into_no_other(autojump_clock, pool):
    """One run is left after a restart: a node let in for the other alone is not taken to be in it."""
    two = pool.config
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(stack, pool)
        token = service.create_token(uses=1, expires_seconds=None, actor="test", reason="test", run="r2")
        node = await stack.enter_async_context(pool.node(10))
        assert await hello(pool, node, token) == "r2"
    pool.config = lambda: two(["r1"])
    async with pool.serving(), AsyncExitStack() as stack:
        learner = await stack.enter_async_context(pool.learner())
        await learner.publish()
        node = await stack.enter_async_context(pool.node(10))
        node.run = "r1"
        with pytest.raises(Refused):
            await node.heartbeat()
        with pytest.raises(Refused) as refused:
            await node.hello()
        assert refused.value.code == "token_run"


async def test_time_is_paid_once_however_often_a_node_moves(autojump_clock, pool, tools):
    """A node that holds a lease in each run, and in each has an account, is paid for one of them at a time."""
    pool.run_settings = {"n": 8, "R": 64, "lease_seconds": 3600.0}
    pool.activation = {"period_seconds": 1.0}
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(stack, pool)
        for number, run in ((20, "r1"), (21, "r2")):
            await past_the_baseline(pool, await join(stack, pool, number, run))
        node = await join(stack, pool, 10, "r1", price=3_600_000)
        began = trio.current_time()
        for run in ("r1", "r2", "r1", "r2", "r1"):
            await go(pool, node, run)
            while service.node_view(node.peer_id).state != "active":
                await trio.sleep(1.0)
                await node.heartbeat(held=1)
            assert (await node.lease(samples=2)).leases
        for _ in range(60):
            await trio.sleep(10.0)
            await node.heartbeat(held=1)
        passed = trio.current_time() - began
        every = [one.account for run in ("r1", "r2") for one in service._desks[run].office.payroll.engaged.values()]
        assert sum(account.milliseconds for account in every) / 1000 <= passed + 1.0


async def test_a_node_moved_before_it_was_measured_is_paid(autojump_clock, pool, tools):
    """Its account had no price of a rollout yet: it has one by the rate until then."""
    pool.run_settings = {"n": 8, "R": 64, "lease_seconds": 600.0}
    pool.activation = {"period_seconds": 60.0}
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(stack, pool)
        await past_the_baseline(pool, await join(stack, pool, 20, "r1"))
        node = await join(stack, pool, 10, "r1", price=3_600_000)
        while service.node_view(node.peer_id).state != "active":
            await trio.sleep(1.0)
            await node.heartbeat()
        leases = (await node.lease()).leases
        await trio.sleep(8.0)
        await node.submit(*map(tools.answer, leases))
        await go(pool, node, "r2")
        with service._office.ledger.reading() as connection:
            table = schema.accounts
            (row,) = connection.execute(sa.select(table).where(table.c.run == "r1")).all()
        assert row.rho is not None
