"""Several runs in one coordinator: who goes where, what goes to which run, and what is kept of it."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress

import pytest
import sqlalchemy as sa
import trio

from echo2.coordinator import history, placement, schema
from echo2.coordinator.capacity import RateMeter
from echo2.coordinator.config import CoordinatorConfig, RunConfig
from echo2.coordinator.created_runs import created_runs, with_created
from echo2.p2p.errors import Refused
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import AppealReply, AppealRequest, RunDescriptor

SECOND = 3
"""The key of the second run's learner."""


@pytest.fixture
def pool(world, tools):
    """A world with the runs r1, of weight 2, and r2."""

    def config(runs=("r1", "r2")):
        one = tools.world.config(world)
        named = {
            "r1": one.run.model_copy(update={"weight": 2.0}),
            "r2": one.run.model_copy(update={"name": "r2", "learner": tools.identity(SECOND).peer_id}),
        }
        told = one.model_dump(exclude={"run", "runs"}) | {"runs": tuple(named[run] for run in runs)}
        return CoordinatorConfig(**told)

    world.config = config
    return world


def welcomed(world, welcome):
    """The run that a welcome names."""
    return open_signed(welcome.descriptor, world.coordinator.peer_id, "run", RunDescriptor).run


async def hello(world, node, token=""):
    """Hello, as a node that goes where it is told."""
    node.run = welcomed(world, await node.hello(token, session=node.session))
    return node.run


async def begin(world, stack):
    """Both runs are published: their learners."""
    learners = []
    for run, number in (("r1", 2), ("r2", SECOND)):
        learner = await stack.enter_async_context(world.learner(number))
        learner.run = run
        assert welcomed(world, await learner.hello()) == run
        await learner.publish()
        learners.append(learner)
    return learners


async def nodes_of(world, stack, count, first=10):
    """So many nodes that take part in any run."""
    nodes = [await stack.enter_async_context(world.node(first + number)) for number in range(count)]
    for node in nodes:
        await hello(world, node, world.token())
        await node.join(hello=False)
    return nodes


def lines(service, action="node placed"):
    return [event.reason for event in reversed(service.events_view(limit=1000)) if event.action == action]


def shares(service):
    return {view.run: view.nodes for view in service.runs_view()}


def replays(service):
    with service._office.ledger.reading() as connection:
        return history.replay(history.read_bodies(connection)) == history.read_state(connection)


async def test_nodes_are_placed_by_weight_as_they_come(autojump_clock, pool):
    """Six nodes go four to two; each placement is a line of the log with its numbers, and is among the decisions."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        await nodes_of(pool, stack, 6)
        assert shares(service) == {"r1": 4, "r2": 2}
        told = lines(service)
        assert len(told) == 6
        assert told[-1].endswith("5 live nodes: r1 has 3 of weight 2, share 3.33, r2 has 2 of weight 1, share 1.67")
        assert [made["action"] for made in service.decisions_view()] == ["place"] * 6
        assert {view.run for view in service.nodes_view()} == {"r1", "r2"}
        assert replays(service)


async def test_a_restart_leaves_every_node_where_it_was(autojump_clock, pool):
    """Runs, placements and the decisions in words come from the ledger; ids of rollouts of two runs never meet."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        nodes = await nodes_of(pool, stack, 3)
        before = [node.run for node in nodes]
        for node in nodes:
            await node.work()
    async with pool.serving() as service, AsyncExitStack() as stack:
        again = [await stack.enter_async_context(pool.node(10 + number)) for number in range(3)]
        for node in again:
            await hello(pool, node)
        assert [node.run for node in again] == before
        assert sorted(made["action"] for made in service.decisions_view()) == ["place"] * 3
        table = schema.rollouts
        with service._office.ledger.reading() as connection:
            rows = connection.execute(sa.select(table.c.id, table.c.run)).all()
        assert {row.run for row in rows} == {"r1", "r2"}
        assert sorted(row.id for row in rows) == list(range(1, len(rows) + 1))


async def test_receipts_are_numbered_for_each_run_alone(autojump_clock, pool, tools):
    """A node that was moved has receipts 1, 2, ... of both runs, and asks each for its own."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        (node,) = await nodes_of(pool, stack, 1)
        first = node.run
        await node.work()
        service.pause_run(first, actor="operator", reason="test")
        await trio.sleep(placement.LOOK_SECONDS + 1.0)
        await hello(pool, node)
        assert {first, node.run} == {"r1", "r2"}
        await node.join(hello=False)
        await node.work()
        await trio.sleep(1.0)
        for run in ("r1", "r2"):
            node.run = run
            sequences = [receipt.sequence for receipt in await node.receipts()]
            assert sequences == list(range(1, len(sequences) + 1))
            assert sequences
        assert replays(service)


async def test_a_moved_node_says_hello_again_and_still_delivers(autojump_clock, pool, tools):
    """Its heartbeat and its request for leases are refused with "moved"; slices, receipts and appeals of the run it
    left are taken there, and count for nothing that is measured of it in the new one."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        (node,) = await nodes_of(pool, stack, 1)
        left = node.run
        leases = (await node.lease()).leases
        await node.manifest(node.installed)
        assert service._desks[left].office.run.current.plan is not None
        service.pause_run(left, actor="operator", reason="test")
        await trio.sleep(placement.LOOK_SECONDS + 1.0)
        assert service._desks[left].office.run.current.plan is None
        for ask in (node.heartbeat, node.lease):
            with pytest.raises(Refused) as refused:
                await ask()
            assert (refused.value.code, refused.value.retry_seconds) == ("moved", 0.0)
        entered = await hello(pool, node)
        assert entered != left
        node.run = left
        acks = await node.submit(*map(tools.answer, leases))
        assert {ack.state for ack in acks} == {"held"}
        await trio.sleep(1.0)
        assert len(await node.receipts()) == sum(lease.sample_count for lease in leases)
        appeal = AppealRequest(run=left, appeal_id=b"a" * 16, subject=leases[0].lease_id.hex(), text="why?")
        assert (await node.ask("appeal", appeal, AppealReply)).state == "open"
        meter = service._office.pool.nodes[node.peer_id].meter
        assert vars(meter) == vars(RateMeter())
        view = service.node_view(node.peer_id)
        assert (view.run, view.mu, view.evaluated) == (entered, None, sum(lease.sample_count for lease in leases))
        assert service.run_view(left).evaluated == view.evaluated
        assert service.run_view(entered).evaluated == 0
        assert [each.evaluated for each in service.nodes_of(entered)] == [0]


async def test_held_requests_of_a_moved_node_are_answered_at_once(autojump_clock, pool):
    """A heartbeat and a request for leases that are held while it is moved do not keep it in the old run."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        nodes = await nodes_of(pool, stack, 3)
        node = next(each for each in nodes if each.run == "r1")
        await node.work()
        began, ended = trio.current_time(), []

        async def held(ask):
            with suppress(Refused):
                while True:
                    await ask()
            ended.append(trio.current_time())

        with trio.fail_after(60.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(held, lambda: node.heartbeat(hold=10.0))
                nursery.start_soon(held, lambda: node.lease(wait=30.0))
                await trio.sleep(25.0)
                service._placement.move({node.peer_id: ("r2", "test")})
        assert all(at - began < 25.5 for at in ended)


async def test_a_join_string_that_names_a_run_is_obeyed(autojump_clock, pool):
    """The node goes there, is not moved, and a run that is not there costs it a refusal that names those that are."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        node = await stack.enter_async_context(pool.node(10))
        for wanted in ("r2", "r1", "r2"):
            node.wanted = wanted
            assert await hello(pool, node, pool.token()) == wanted
        await trio.sleep(3 * placement.LOOK_SECONDS)
        node.wanted = "r9"
        with pytest.raises(Refused, match="serves the runs r1, r2, not r9") as refused:
            await node.hello()
        assert refused.value.retry_seconds is None
        assert lines(service)[0] == "to r2: its join string names this run"
        assert lines(service)[1] == "to r1: from r2: its join string names this run"


async def test_a_token_may_be_for_one_run(autojump_clock, pool):
    """It lets a node into that run alone, now and later; another token of the operator's changes that."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        made = {"uses": 1, "expires_seconds": None, "actor": "test", "reason": "test"}
        token = service.create_token(**made, run="r2")
        node = await stack.enter_async_context(pool.node(10))
        node.wanted = "r1"
        with pytest.raises(Refused, match="the join token is for the run r2, not r1"):
            await node.hello(token)
        node.wanted = None
        assert await hello(pool, node, token) == "r2"
        node.wanted = "r1"
        with pytest.raises(Refused, match="let in for the run r2 alone") as refused:
            await node.hello()
        assert refused.value.code == "token_run"
        assert await hello(pool, node, service.create_token(**made)) == "r1"
        with pytest.raises(KeyError):
            service.create_token(**made, run="r9")
        assert [row.run for row in service.tokens_view()] == ["r2", None]


async def test_a_ban_holds_in_every_run(autojump_clock, pool, tools):
    """What a suspended node delivered to two runs is withdrawn from both, in one transaction; a ban refuses it at any
    run's hello."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        learners = await begin(pool, stack)
        (node,) = await nodes_of(pool, stack, 1)
        for _ in range(2):
            await node.work()
            await trio.sleep(1.0)
            leases = (await node.lease()).leases
            assert {lease.kind for lease in leases} == {"train"}
            await node.submit(*map(tools.answer, leases))
            await trio.sleep(1.0)
            other = "r2" if node.run == "r1" else "r1"
            service._placement.move({node.peer_id: (other, "test")})
            await hello(pool, node)
            await node.join(hello=False)
        assert all(service.run_view(run).rollouts.admitted for run in ("r1", "r2"))
        service.suspend_node(node.peer_id, actor="operator", reason="test")
        for run in ("r1", "r2"):
            counts = service.run_view(run).rollouts
            assert (counts.admitted, counts.withdrawn) == (0, counts.submitted)
        service.ban_node(node.peer_id, actor="operator", reason="test")
        for wanted in ("r1", "r2", None):
            node.wanted = wanted
            with pytest.raises(Refused, match="banned this node"):
                await node.hello()
        assert replays(service)
        assert len(learners) == 2


async def test_learners_are_told_apart_by_their_keys(autojump_clock, pool):
    """A request of one run's learner for another run is refused, and nothing is changed by it."""
    async with pool.serving(), AsyncExitStack() as stack:
        first, _ = await begin(pool, stack)
        first.run = "r2"
        with pytest.raises(Refused) as refused:
            await first.fetch()
        assert refused.value.code == "not_the_learner"
        first.run = "r9"
        with pytest.raises(Refused) as refused:
            await first.report()
        assert refused.value.code == "unknown_run"
        stranger = await stack.enter_async_context(pool.learner(9))
        with pytest.raises(Refused, match="the learner of none of the runs r1, r2"):
            await stranger.hello()


async def test_a_paid_node_that_is_moved_stands_by_and_leaves_its_account(autojump_clock, pool):
    """Its account in the old run is released with the move; the new run's scheduler opens another when it calls it."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        node = await stack.enter_async_context(pool.node(10))
        node.price = 360_000
        run = await hello(pool, node, pool.token())
        await node.join(hello=False)
        await trio.sleep(15.0)
        await node.heartbeat()
        assert service.node_view(node.peer_id).state == "active"
        other = "r2" if run == "r1" else "r1"
        service._placement.move({node.peer_id: (other, "test")})
        assert service.node_view(node.peer_id).state == "standby"
        accounts = schema.accounts
        with service._office.ledger.reading() as connection:
            rows = connection.execute(sa.select(accounts.c.run, accounts.c.released)).all()
        assert [(row.run, row.released is None) for row in rows] == [(run, False)]
        await hello(pool, node)
        for _ in range(3):
            await node.heartbeat()
            await trio.sleep(10.0)
        with service._office.ledger.reading() as connection:
            rows = connection.execute(sa.select(accounts.c.number, accounts.c.run).order_by(accounts.c.number)).all()
        assert [(row.number, row.run) for row in rows] == [(1, run), (2, other)]
        assert replays(service)
        told = [(made["run"], made["action"]) for made in service.decisions_view()]
        assert told.count((other, "activate")) == told.count((run, "activate")) == 1
        assert told.count((other, "place")) == 1
    async with pool.serving() as service:
        told = [made["action"] for made in service.decisions_view()]
        assert (told.count("activate"), told.count("place")) == (2, 2)


async def test_a_run_may_be_created_under_way(autojump_clock, pool, tools):
    """It takes nodes of the others, and is there after a restart; its name and its learner must be its own."""
    pool_config = pool.config
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        await nodes_of(pool, stack, 3)
        one = pool_config().run
        third = one.model_copy(update={"name": "r3", "learner": tools.identity(4).peer_id, "weight": 3.0})
        view = await service.create_run(third, actor="operator", reason="more to learn")
        assert (view.run, view.state, view.weight) == ("r3", "ready", 3.0)
        for wrong in (third, third.model_copy(update={"name": "r4"}), one.model_copy(update={"name": "r4"})):
            with pytest.raises(Refused) as refused:
                await service.create_run(wrong, actor="operator", reason="again")
            assert refused.value.code == "run_exists"
        assert lines(service, "run created") == ["more to learn"]
        learner = await stack.enter_async_context(pool.learner(4))
        learner.run = "r3"
        assert welcomed(pool, await learner.hello()) == "r3"
        await learner.publish()
        late = await stack.enter_async_context(pool.node(20))
        assert await hello(pool, late, pool.token()) == "r3"
        await late.join(hello=False)
        assert {lease.kind for lease in await late.work()} == {"eval"}
        created = created_runs(service._office.ledger)
        assert list(created) == ["r3"]
        assert replays(service)
    served = with_created(pool_config(), created)
    assert [run.name for run in served.all_runs] == ["r1", "r2", "r3"]
    pool.config = lambda: served
    async with pool.serving() as service:
        assert service.run_view("r3").evaluated == 4
        assert [view.weight for view in service.runs_view()] == [2.0, 1.0, 3.0]


async def test_all_runs_begin_anew_after_a_commit_in_doubt(autojump_clock, pool, tools):
    """A run that was created is still served, nodes are where they were, and one that names its run is not moved."""
    async with pool.serving() as service, AsyncExitStack() as stack:
        await begin(pool, stack)
        nodes = await nodes_of(pool, stack, 3)
        bound = await stack.enter_async_context(pool.node(20))
        bound.wanted = "r2"
        await hello(pool, bound, pool.token())
        third = pool.config().run.model_copy(update={"name": "r3", "learner": tools.identity(4).peer_id})
        await service.create_run(third, actor="operator", reason="test")
        service._office.ledger.in_doubt = True
        await trio.sleep(2.0)
        assert [view.run for view in service.runs_view()] == ["r1", "r2", "r3"]
        for node in (*nodes, bound):
            await node.heartbeat()
        assert shares(service) == {"r1": 2, "r2": 2, "r3": 0}
        for _ in range(20):
            await trio.sleep(10.0)
            for node in (*nodes, bound):
                with suppress(Refused):
                    await node.heartbeat()
        assert service.node_view(bound.peer_id).run == "r2"
        learner = await stack.enter_async_context(pool.learner(4))
        learner.run = "r3"
        assert welcomed(pool, await learner.hello()) == "r3"
        await learner.publish()


async def test_a_node_of_a_run_that_is_gone_is_placed_anew(autojump_clock, pool):
    """A run taken out of the settings leaves its nodes to the others."""
    two = pool.config
    async with pool.serving(), AsyncExitStack() as stack:
        await begin(pool, stack)
        nodes = await nodes_of(pool, stack, 2)
        assert {node.run for node in nodes} == {"r1", "r2"}
    pool.config = lambda: two(["r1"])
    async with pool.serving() as service, AsyncExitStack() as stack:
        for number in range(2):
            node = await stack.enter_async_context(pool.node(10 + number))
            assert await hello(pool, node) == "r1"
        assert [view.run for view in service.runs_view()] == ["r1"]


def test_created_runs_give_way_to_the_settings_file(pool, tools, caplog):
    """One whose name or learner the file has now, or whose settings make no sense any more, is not served beside it."""
    config = pool.config()
    same = config.run.model_copy(update={"name": "r5"})
    kept = {"r2": config.runs[0].model_dump_json(), "r5": same.model_dump_json(), "r6": '{"name": "r6"}'}
    assert with_created(config, kept).all_runs == config.all_runs
    assert "the run r5, created over REST, is not served: the runs 'r1' and 'r5' have one learner" in caplog.text
    assert "the run r6, created over REST, is not served" in caplog.text
    fine = RunConfig(**same.model_dump() | {"learner": tools.identity(7).peer_id})
    assert with_created(config, {"r5": fine.model_dump_json()}).all_runs == (*config.all_runs, fine)
