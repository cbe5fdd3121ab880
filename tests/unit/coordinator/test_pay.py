"""Pay and budgets in the coordinator: what is posted is what the rows of rollouts say, to the micro-dollar."""

from __future__ import annotations

from contextlib import closing

import pytest
import sqlalchemy as sa
import trio
from pydantic import ValidationError

from echo2.coordinator import accounts, history, schema
from echo2.coordinator.ledger import LedgerUnavailable, open_ledger
from echo2.coordinator.pricing import payable
from echo2.coordinator.records import record
from echo2.p2p.messages import PRICE_MICROS_MAX, Hello

PAID, OTHER, FREE = 10, 11, 12
PRICE = 360_000
"""$0.36 an hour: 100 micro-dollars a second."""


def ledger_of(world):
    return closing(open_ledger(world.url))


def rows(world, name):
    with ledger_of(world) as ledger, ledger.reading() as connection:
        table = schema.metadata.tables[name]
        return [row._mapping for row in connection.execute(sa.select(table).order_by(*table.primary_key))]


def postings(world, unit, peer=None):
    with ledger_of(world) as ledger, ledger.reading() as connection:
        assert accounts.verify(connection).fault == ""
        return [each for each in accounts.read(connection, peer=peer) if each.unit == unit]


def check(world, suspended=()):
    """Every payable rollout counts once in its account, every posting is what is due, the log tells the tables."""
    found = {row["number"]: row for row in rows(world, "accounts")}
    of_lease = {row["lease_id"]: row["account"] for row in rows(world, "leases")}
    counted = dict.fromkeys(found, 0)
    credits_due = 0
    for row in rows(world, "rollouts"):
        paid = payable(row["state"], in_time=bool(row["in_time"]), suspended=row["peer"] in suspended)
        if not paid or row["state"] in {"held", "admitted"}:
            continue
        credits_due += 1_000_000 if row["state"] in {"consumed", "evaluated"} else 500_000
        if of_lease[row["lease_id"]] is not None:
            counted[of_lease[row["lease_id"]]] += 1
    assert {number: row["rollouts"] for number, row in found.items()} == counted
    for row in found.values():
        earned = 0 if row["rho"] is None else row["rollouts"] * row["rho"] // 10**6
        assert row["entered"] == min(earned, row["price"] * row["milliseconds"] // 3_600_000)
    assert sum(each.amount_micros for each in postings(world, "usd")) == sum(row["entered"] for row in found.values())
    assert sum(each.amount_micros for each in postings(world, "credit")) == credits_due
    with ledger_of(world) as ledger, ledger.reading() as connection:
        assert history.replay(history.read_bodies(connection)) == history.read_state(connection)


async def begin(world, learner, *nodes, restart=False):
    await learner.hello()
    await learner.publish()
    for node in nodes:
        await node.join(hello=not restart)
    for _ in range(2):  # the scheduler looks each ten seconds
        await trio.sleep(10.0)
        for node in nodes:
            await node.heartbeat()


async def gather(learner, node, tools, count, seconds=0.5):
    """So many admitted rollouts of this node's work; each round takes it so long."""
    found = []
    while len(found) < count:
        await node.heartbeat()
        leases = (await node.lease(samples=4, wait=5.0)).leases
        await trio.sleep(seconds)
        if leases:
            await node.submit(*map(tools.answer, leases))
        found += (await learner.fetch(wait=1.0)).rollouts
    return found


async def test_a_paid_pool_is_paid_to_the_micro_dollar(autojump_clock, world, tools):
    """rho is fixed once the node is measured; what is consumed, evaluated or too old in time is paid, under the cap."""
    async with world.serving() as service, world.learner() as learner, world.node(PAID) as node:
        node.price = PRICE
        await begin(world, learner, node)
        assert not service.nodes_view()[0].standby
        rollouts = await gather(learner, node, tools, 9)
        await learner.train(rollouts[:8])
        await learner.report([tools.done(rollouts[8], state="stale", step=9, reason="too old")])
        await trio.sleep(15.0)
        await node.heartbeat()
        service.stop_run("r1", actor="operator", reason="enough")
        for _ in range(20):
            await trio.sleep(10.0)
            await node.heartbeat()
        view, run = service.nodes_view()[0], service.run_view("r1")
    check(world)
    (account,) = rows(world, "accounts")
    decided = [row for row in rows(world, "rollouts") if row["state"] not in {"held", "admitted"}]
    assert {row["state"] for row in decided} >= {"consumed", "evaluated", "stale"}
    assert account["rollouts"] == len(decided)
    assert account["rho"] == round(PRICE * 10**6 / 3600 / account["mu"])
    assert account["closed"] is not None
    assert account["entered"] > 0
    assert view.balance_dollars == run.spent_dollars == account["entered"] / 1e6
    assert view.balance_credits == run.credits
    assert (run.committed_dollars, run.cost_hour_dollars) == (0.0, 0.0)


@pytest.mark.parametrize("after", ["grant", "submit", "train"])
async def test_a_kill_neither_loses_nor_doubles_pay(autojump_clock, world, tools, after):
    """Between any two steps; price, mu and what is out are known again; each report that comes twice counts once."""
    async with world.learner() as learner, world.node(PAID) as node:
        node.price = PRICE
        leases, rollouts = (), []
        async with world.serving() as service:
            await begin(world, learner, node)
            rollouts = await gather(learner, node, tools, 8)
            await trio.sleep(10.0)
            await node.heartbeat()
            leases = (await node.lease(samples=4, wait=5.0)).leases
            assert leases
            if after != "grant":
                await node.submit(*map(tools.answer, leases))
            if after == "train":
                await learner.train(rollouts[:8])
            before = service.nodes_view()[0]
        async with world.serving() as service:
            await learner.hello()
            await node.hello()
            await node.heartbeat()
            shown = service.nodes_view()[0]
            assert (shown.price_hour, shown.rho_dollars, shown.standby) == (0.36, before.rho_dollars, False)
            assert shown.mu == pytest.approx(rows(world, "accounts")[0]["mu"])
            await node.submit(*map(tools.answer, leases))
            await node.submit(*map(tools.answer, leases))
            if after == "train":
                learner.version = 0
            await learner.train(rollouts[:8])
            await trio.sleep(70.0)
            await node.heartbeat()
            service.stop_run("r1", actor="operator", reason="enough")
    check(world)


async def test_what_a_suspended_node_delivered_is_not_paid(autojump_clock, world, tools):
    """And what the learner has to give back of it neither."""
    async with world.serving() as service, world.learner() as learner, world.node(PAID) as node:
        node.price = PRICE
        await begin(world, learner, node)
        rollouts = await gather(learner, node, tools, 8)
        service.suspend_node(node.peer_id, actor="operator", reason="odd rewards")
        await learner.report([tools.done(rollout, state="withdrawn") for rollout in rollouts])
        await trio.sleep(200.0)
        service.restore_node(node.peer_id, actor="operator", reason="talked")
    check(world, suspended={node.peer_id})
    assert {row["state"] for row in rows(world, "rollouts") if row["kind"] == "train"} == {"withdrawn"}


async def test_a_slice_after_its_time_is_paid_only_if_it_is_used(autojump_clock, world, tools):
    """Late and wanted: as any other. Late and of a group that is closed: neither paid nor credited."""
    world.run_settings = {"lease_seconds": 5.0}
    async with (
        world.serving() as service,
        world.learner() as learner,
        world.node(FREE) as free,
        world.node(PAID) as node,
    ):
        node.price = PRICE
        await begin(world, learner, node)
        await gather(learner, node, tools, 4)
        late = (await node.lease(samples=4, wait=5.0)).leases
        await trio.sleep(8.0)
        await node.heartbeat()
        await node.submit(tools.answer(late[0]))
        assert all(row["in_time"] == 0 for row in rows(world, "rollouts") if row["lease_id"] == late[0].lease_id)
        service.stop_run("r1", actor="operator", reason="enough")
        await node.submit(tools.answer(late[1]))
        stale = [row for row in rows(world, "rollouts") if row["lease_id"] == late[1].lease_id]
        assert [(row["state"], row["in_time"]) for row in stale] == [("stale", 0)] * len(stale)
        await free.hello(world.token())
    check(world)


async def test_a_slice_that_is_not_what_was_ordered_is_not_paid_because_nobody_wants_it(autojump_clock, world, tools):
    """In time, of a run that is over: paid if it is whole, not if it only looks like a slice."""
    async with world.serving() as service, world.learner() as learner, world.node(PAID) as node:
        node.price = PRICE
        await begin(world, learner, node)
        await gather(learner, node, tools, 4)
        good, bad = (await node.lease(samples=4, wait=5.0)).leases[:2]
        service.stop_run("r1", actor="operator", reason="enough")
        await node.submit(tools.answer(good), tools.answer(bad, finish="length"))
    states = {row["lease_id"]: (row["state"], row["in_time"]) for row in rows(world, "rollouts")}
    assert (states[good.lease_id], states[bad.lease_id]) == (("stale", 1), ("stale", 0))
    check(world)


async def test_a_budget_stops_the_leases_and_says_so(autojump_clock, world, tools):
    """To the node and the operator; never a micro-dollar more is posted, and volunteers go on."""
    world.run_settings = {"budget": 0.0005, "lease_seconds": 2.0}
    async with (
        world.serving() as service,
        world.learner() as learner,
        world.node(PAID) as node,
        world.node(FREE) as free,
    ):
        node.price = PRICE
        await begin(world, learner, node)
        refused = ""
        for _ in range(60):
            await node.heartbeat()
            reply = await node.lease(samples=4)
            if reply.reason.startswith("the run's budget"):
                refused = reply.reason
                break
            await trio.sleep(0.5)
            if reply.leases:
                await node.submit(*map(tools.answer, reply.leases))
            fetched = (await learner.fetch(wait=0.5)).rollouts
            if len(fetched) >= 4:
                await learner.report([tools.done(rollout) for rollout in fetched])
        assert refused.startswith("the run's budget of $0.0005 is reached")
        run = service.run_view("r1")
        assert run.waiting.startswith("the run's budget of $0.0005 is reached")
        assert run.budget_dollars == 0.0005
        assert 0 < run.spent_dollars + run.committed_dollars <= 0.0005
        await free.join()
        assert (await free.lease()).leases or "budget" not in (await free.lease()).reason
        assert "budget" not in service.run_view("r1").waiting
    check(world)
    assert sum(each.amount_micros for each in postings(world, "usd")) <= 500


async def test_a_price_that_changes_is_for_the_next_activation(autojump_clock, world, tools):
    """The node goes on at its terms; as a volunteer its account ends, and later it stands by for the new price."""
    world.activation = {"period_seconds": 1.0}
    async with world.serving() as service, world.learner() as learner, world.node(PAID) as node:
        node.price = PRICE
        await begin(world, learner, node)
        await gather(learner, node, tools, 2)
        node.price = 2 * PRICE
        await node.hello()
        assert (await node.lease(samples=2, wait=5.0)).leases
        assert service.nodes_view()[0].price_hour == 0.36
        node.price = 0
        await node.hello()
        await trio.sleep(10.0)
        await node.heartbeat()
        view = service.nodes_view()[0]
        assert (view.price_hour, view.standby) == (0.0, False)
        assert (await node.lease(samples=2, wait=5.0)).leases
        node.price = 3 * PRICE
        await node.hello()
        assert service.nodes_view()[0].standby
        for _ in range(3):
            await trio.sleep(10.0)
            await node.heartbeat()
        assert not service.nodes_view()[0].standby
    check(world)
    assert [row["price"] for row in rows(world, "accounts")][-2:] == [PRICE, 3 * PRICE]  # it may have been idle before
    assert [row["account"] for row in rows(world, "leases")][-1] is None


def test_whose_price_it_is(world):
    """What the node asks; one whom the settings name gets at most what stands there, and that when it asks for none."""
    peer = world.learner_identity.peer_id
    world.activation = {"prices": {peer: 0.5}}
    price = world.config().activation.price
    assert [price(peer, asked) for asked in (0, 400_000, 600_000)] == [500_000, 400_000, 500_000]
    assert [price("another", asked) for asked in (0, 600_000)] == [0, 600_000]


async def test_who_asks_more_than_the_ceiling_does_not_work(autojump_clock, world):
    """Whatever the node asks, the operator's bound holds."""
    world.activation = {"price_ceiling_hour": 0.3}
    async with world.serving() as service, world.learner() as learner, world.node(PAID) as node:
        node.price = PRICE
        await begin(world, learner, node)
        assert service.nodes_view()[0].standby
        assert rows(world, "accounts") == []


@pytest.mark.parametrize("price", [-1, float("nan"), 0.35, PRICE_MICROS_MAX + 1, 2**63, True, "1"])
def test_a_price_that_is_none_is_not_read(price):
    """Negative, not a number, not whole, beyond all reason: it costs the sender its hello, and nobody else anything."""
    with pytest.raises(ValidationError):
        Hello(wire_versions=(1,), software="s", role="node", name="n", price_micros_hour=price)


async def test_no_pay_that_could_not_be_recorded(autojump_clock, world, tools, monkeypatch):
    """The report is refused whole; sent again it is booked once."""
    async with world.serving(), world.learner() as learner, world.node(PAID) as node:
        node.price = PRICE
        await begin(world, learner, node)
        rollouts = await gather(learner, node, tools, 8)

        def refuse(*_args, **_values):
            raise LedgerUnavailable("disk full")

        with monkeypatch.context() as patch:
            patch.setattr("echo2.coordinator.accounts.append", refuse)
            with pytest.raises(Exception, match="disk full"):
                await learner.train(rollouts)
        learner.version = 0
        await learner.train(rollouts)
    check(world)


def engage(service, peer):
    """As the scheduler would at its next look, were the pool too small."""
    office = service._office
    service._node_life.change(peer, "activated", actor="scheduler", reason="test")
    pay = office.settlement()
    pay.open(peer, PRICE, None)
    with office.ledger.transaction() as connection:
        record(connection, pay.changes(office.wall()), wall=office.wall(), actor="scheduler", action="accounts")
    pay.apply()


async def test_one_deal_promises_no_more_than_the_budget(autojump_clock, world):
    """Two nodes wait for the run to go on, and there is money for one of them: the other is told."""
    world.run_settings = {"budget": 0.0003, "lease_seconds": 2.0}
    async with (
        world.serving() as service,
        world.learner() as learner,
        world.node(PAID) as node,
        world.node(OTHER) as other,
    ):
        node.price = other.price = PRICE
        await begin(world, learner, node, other)
        service.pause_run("r1", actor="operator", reason="test")
        for view in service.nodes_view():
            if view.standby:
                engage(service, view.peer)
        replies = []

        async def ask(each):
            replies.append(await each.lease(samples=2, wait=1.0))

        async with trio.open_nursery() as nursery:
            for each in (node, other):
                nursery.start_soon(ask, each)
            await trio.sleep(0.5)
            service.resume_run("r1", actor="operator", reason="test")
        assert [bool(reply.leases) for reply in replies] == [True, False]
        assert replies[1].reason.startswith("the run's budget of $0.0003 is reached")
        assert service.run_view("r1").committed_dollars == 0.0002


async def test_what_a_deal_could_not_record_is_promised_to_nobody(autojump_clock, world, monkeypatch):
    """However often the ledger fails, the budget is as it was, and afterwards there is the same room."""
    world.run_settings = {"budget": 0.0003, "lease_seconds": 2.0}
    async with world.serving() as service, world.learner() as learner, world.node(PAID) as node:
        node.price = PRICE
        await begin(world, learner, node)
        payroll = service._office.payroll
        before = dict(payroll.out), {number: one.account.liability for number, one in payroll.engaged.items()}

        def refuse(*_args, **_values):
            raise LedgerUnavailable("disk full")

        with monkeypatch.context() as patch:
            patch.setattr("echo2.coordinator.lease_desk.record", refuse)
            for _ in range(3):
                with pytest.raises(Exception, match="disk full"):
                    await node.lease(samples=2)
                left = dict(payroll.out), {number: one.account.liability for number, one in payroll.engaged.items()}
                assert left == before
        assert (await node.lease(samples=2)).leases
    check(world)
