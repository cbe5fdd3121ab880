"""Who is let in, by mode, and how a node's life goes on from there: over the wire, with restarts."""

from __future__ import annotations

import pytest
import trio

from echo2.coordinator import admission
from echo2.p2p.errors import Refused, Unreachable

PROBATION = {"warmup_leases": 10}


@pytest.fixture
def strict(world):
    """A pool with a probation as it is by default."""
    world.admission = dict(PROBATION)
    world.run_settings = {"steps": 100, "R": 32}
    return world


async def ready(learner, *nodes, token=""):
    await learner.hello()
    await learner.publish()
    for node in nodes:
        await node.hello(token)
        await node.join(hello=False)


async def work_until(service, node, state, rounds=20):
    for _ in range(rounds):
        if service.nodes_view()[0].state == state:
            return
        await node.work()
        await trio.sleep(1.0)
    raise AssertionError(service.nodes_view()[0])


def events(service, node):
    return [move.event for move in reversed(service.transitions_view(node.peer_id))]


async def test_open_to_anyone(autojump_clock, strict):
    """No token, and no operator; but a probation."""
    strict.admission["mode"] = "open"
    async with strict.serving() as service, strict.node(10) as node:
        assert (await node.hello()).node_state == "probation"
        (move,) = service.transitions_view(node.peer_id)
        assert (move.event, move.from_state, move.to_state) == ("joined", "new", "probation")
        assert (move.actor, move.reason) == (node.peer_id, "this pool is open to anyone")
        assert move.wall_seconds == pytest.approx(strict.wall_offset, abs=1.0)


async def test_by_token_then_probation(autojump_clock, strict):
    """A token admits, it vouches for nothing."""
    async with strict.serving(), strict.node(10) as node:
        with pytest.raises(Refused) as refused:
            await node.hello()
        assert refused.value.code == "token_missing"
        assert (await node.hello(strict.token(uses=1))).node_state == "probation"


async def test_by_hand(autojump_clock, strict):
    """A node that has applied may wait and nothing else; admitted, it learns so at once and is in probation."""
    strict.admission["mode"] = "hand"
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        await learner.hello()
        manifest_hash, _ = await learner.publish()
        assert (await node.hello()).node_state == "applied"
        notice = await node.heartbeat()
        assert (notice.node_state, notice.version) == ("applied", None)
        assert notice.node_reason == "this pool's operator admits each new node by hand"
        node.installed = manifest_hash
        assert (await node.lease()).reason == "applied: the operator has yet to admit this node"
        with pytest.raises(Refused) as refused:
            await node.manifest(manifest_hash)
        assert refused.value.code == "applied"
        assert service.pool_view().nodes_applied == 1
        assert "1 nodes wait for the operator" in strict.run.waiting
        assert not service.admitted(node.peer_id)
        with pytest.raises(Refused, match="cannot be suspended; it is given nothing yet"):
            service.suspend_node(node.peer_id, actor="operator", reason="odd")
        told = []

        async def wait():
            told.append((await node.heartbeat(hold=10.0), trio.current_time()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(1.0)
            began = trio.current_time()
            service.admit_node(node.peer_id, actor="operator", reason="a friend")
        ((notice, at),) = told
        assert (notice.node_state, notice.node_reason) == ("probation", "a friend")
        assert at - began < 0.1
        assert (await node.lease()).leases
        assert events(service, node) == ["applied", "admitted"]
        with pytest.raises(Refused, match="a node that is probation cannot be admitted"):
            service.admit_node(node.peer_id, actor="operator", reason="again")


async def test_a_token_spares_the_application(autojump_clock, strict):
    """And nothing else; a spent one is no worse than none."""
    strict.admission["mode"] = "hand"
    async with strict.serving(), strict.node(10) as node, strict.node(11) as other:
        token = strict.token(uses=1)
        assert (await node.hello(token)).node_state == "probation"
        assert (await other.hello(token)).node_state == "applied"
        assert (await other.hello(strict.token(uses=1))).node_state == "probation", "its owner was sent one since"


async def test_applications_are_bounded(autojump_clock, strict):
    """As many as may wait; one that fell silent makes room, and leaves nothing behind."""
    strict.admission |= {"mode": "hand", "applied_max": 2}
    async with strict.serving() as service, strict.node(10) as a, strict.node(11) as b, strict.node(12) as c:
        await a.hello()
        await trio.sleep(1.0)
        await b.hello()
        with pytest.raises(Refused) as refused:
            await c.hello()
        assert refused.value.code == "too_many_applied"
        assert refused.value.retry_seconds
        await trio.sleep(40.0)
        assert (await c.hello()).node_state == "applied"
        assert [view.peer for view in service.nodes_view()] == [b.peer_id, c.peer_id]
        with pytest.raises(KeyError):
            service.transitions_view(a.peer_id)
        assert (await c.heartbeat()).node_state == "applied"
    async with strict.serving() as service:
        assert [view.peer for view in service.nodes_view()] == [b.peer_id, c.peer_id]


async def test_probation_to_active(autojump_clock, strict, tools):
    """Measured by our clock under the real weights, ten leases, then active; few samples at once until then."""
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        await ready(learner, node, token=strict.token())
        granted = (await node.lease()).leases
        assert sum(lease.sample_count for lease in granted) == 4, "one group"
        await trio.sleep(2.0)
        await node.submit(*map(tools.answer, granted))
        view = service.nodes_view()[0]
        assert view.benchmark_rollouts_per_second == pytest.approx(4 / 2.0, rel=0.05)
        assert view.benchmark_tokens_per_second == pytest.approx(8 / 2.0, rel=0.05)
        assert (view.warmup_returned, view.warmup_leases) == (len(granted), 10)
        notice = await node.heartbeat()
        assert (notice.warmup_returned, notice.warmup_leases) == (len(granted), 10)
        await work_until(service, node, "active")
        assert events(service, node) == ["joined", "passed"]
        assert "tokens/s" in service.nodes_view()[0].state_reason
        assert service.nodes_view()[0].state_by == "coordinator"


async def test_progress_survives_a_restart_of_the_coordinator(autojump_clock, strict):
    """Nobody begins anew because we did."""
    async with strict.learner() as learner, strict.node(10) as node:
        async with strict.serving() as service:
            await ready(learner, node, token=strict.token())
            await node.work()
            await trio.sleep(1.0)
            before = service.nodes_view()[0]
            assert before.warmup_returned in {2, 4}
        async with strict.serving() as service:
            after = service.nodes_view()[0]
            assert after.state == "probation"
            assert (after.warmup_returned, after.benchmark_tokens_per_second) == (
                before.warmup_returned, before.benchmark_tokens_per_second,
            )  # fmt: skip
            await node.hello()
            await learner.hello()
            await work_until(service, node, "active")


async def test_a_node_that_answers_too_little_is_suspended_for_a_while(autojump_clock, strict):
    """Three of its first ten leases expire; an hour later its probation begins anew."""
    strict.run_settings |= {"lease_seconds": 5.0}
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        await ready(learner, node, token=strict.token())
        for _ in range(20):
            if service.nodes_view()[0].state == "suspended":
                break
            await node.lease()
            await node.heartbeat(held=2)
            await trio.sleep(7.0)
        view = service.nodes_view()[0]
        assert view.state == "suspended"
        assert "of its first 10 leases did not come back valid in time" in view.state_reason
        assert view.state_expires - view.state_since == pytest.approx(3600.0)
        notice = await node.heartbeat()
        assert notice.node_state == "suspended"
        assert 3590.0 < notice.node_expires_seconds <= 3600.0
        assert (await node.lease()).reason.startswith("suspended: probation: ")
        await trio.sleep(3601.0)
        assert (await node.heartbeat()).node_state == "probation"
        view = service.nodes_view()[0]
        assert (view.warmup_returned, view.warmup_failed, view.state_reason) == (0, 0, "its suspension is over")
        await node.heartbeat()
        await work_until(service, node, "active")
        assert events(service, node) == ["joined", "failed", "lapsed", "passed"]


async def test_too_slow_for_this_pool(autojump_clock, strict, tools):
    """`benchmark_tokens_per_second_min`, with the number that was measured."""
    strict.admission["benchmark_tokens_per_second_min"] = 1000.0
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        await ready(learner, node, token=strict.token())
        granted = (await node.lease()).leases
        await trio.sleep(2.0)
        await node.submit(*map(tools.answer, granted))
        await trio.sleep(1.0)
        assert service.nodes_view()[0].state == "suspended"
        assert "too slow: 4.0 tokens/s" in service.nodes_view()[0].state_reason.replace("3.9", "4.0")


async def test_others_do_not_depend_on_a_node_in_probation(autojump_clock, strict):
    """It is sent snapshots and told to nobody; when it has passed it may relay."""
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        await ready(learner, node, token=strict.token())
        plan, _ = await node.manifest(node.installed)
        assert [entry.node.addresses for entry in plan.entries] == [()]
        await work_until(service, node, "active")
        plan, _ = await node.manifest(node.installed)
        assert [entry.node.addresses for entry in plan.entries] == [node.transport.addresses]


async def test_more_than_five_percent_expired(autojump_clock, strict, tools):
    """Of the last forty at least; with its words and an end; a good node beside it goes on."""
    strict.run_settings |= {"lease_seconds": 5.0, "R": 64}
    strict.admission["warmup_leases"] = 0
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        await ready(learner, node, token=strict.token())
        rounds = 0
        while service.nodes_view()[0].state == "active" and rounds < 60:
            rounds += 1
            leases = (await node.lease(samples=4)).leases
            await node.submit(*map(tools.answer, leases[1:] if rounds % 5 == 0 else leases))
            await node.heartbeat(held=1)
            await trio.sleep(6.0)
        view = service.nodes_view()[0]
        assert view.state == "suspended", "one of ten is too many"
        assert "leases were not answered" in view.state_reason
        assert "at most 5 % may be" in view.state_reason
        assert view.state_by == "coordinator"
        assert service.nodes_view()[0].leases_judged >= 40
        assert not strict.run.rollouts.withdrawn, "what it made is honest work"


async def test_one_crash_is_forgiven(autojump_clock, strict):
    """All that it held is lost with it, far more than 5 %; it is back to work at once."""
    strict.admission["warmup_leases"] = 0
    strict.run_settings |= {"R": 64}
    home = b"h" * 16
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.hello(strict.token(), session=node.session, home=home)
        await node.join(hello=False)
        for _ in range(25):
            await node.work(samples=4)
            await trio.sleep(0.1)
        assert len((await node.lease()).leases) >= 4
        node.session, node.sequence = b"2" * 16, 0
        await node.hello(session=node.session, home=home)
        await node.join(hello=False)
        await trio.sleep(2.0)
        assert service.nodes_view()[0].leases_unanswered >= 4
        assert service.nodes_view()[0].state == "active"
        assert await node.work()


async def test_draining_finishes_what_it_holds(autojump_clock, strict, tools):
    """No new leases, no new snapshots; its rollouts are taken; neither hello nor a restart of ours undoes it."""
    strict.admission["warmup_leases"] = 0
    async with strict.learner() as learner, strict.node(10) as node:
        async with strict.serving() as service:
            await ready(learner, node, token=strict.token())
            leases = (await node.lease(samples=4)).leases
            service.drain_node(node.peer_id, actor="operator", reason="the machine moves")
            assert (await node.lease()).reason == "draining: the machine moves"
            assert (await node.heartbeat(held=2)).node_state == "draining"
            assert {ack.state for ack in await node.submit(*map(tools.answer, leases))} == {"held"}
            assert (await node.hello()).node_state == "draining"
        async with strict.serving() as service:
            await learner.hello()
            assert (await node.hello()).node_state == "draining"
            assert (await node.heartbeat()).node_state == "draining"
            await trio.sleep(60.0)
            assert service.nodes_view()[0].state == "left", "not heard of any more"
            with pytest.raises(Refused) as refused:
                await node.heartbeat()
            assert refused.value.code == "hello_first"
            assert (await node.hello()).node_state == "draining"
            service.restore_node(node.peer_id, actor="operator", reason="it is back")
            assert (await node.heartbeat()).node_state == "active"
            assert events(service, node) == ["joined", "passed", "drained", "gone", "returned", "restored"]


async def test_a_banned_node_is_told_why_then_refused(autojump_clock, strict, tools):
    """Its held heartbeat says it; its hello once more; then its connections end. It stays so over restarts of ours."""
    async with strict.learner() as learner, strict.node(10) as node:
        async with strict.serving() as service, trio.open_nursery() as nursery:
            await ready(learner, node, token=strict.token())
            leases = (await node.lease()).leases
            told = []

            async def wait():
                told.append(await node.heartbeat(hold=10.0, held=2))

            nursery.start_soon(wait)
            await trio.sleep(1.0)
            service.ban_node(node.peer_id, actor="operator", reason="forged rewards")
            await trio.sleep(0.2)
            assert [(notice.node_state, notice.node_reason) for notice in told] == [("banned", "forged rewards")]
            for ask in (node.lease, node.heartbeat, node.hello, lambda: node.submit(*map(tools.answer, leases))):
                with pytest.raises(Refused, match="banned this node: forged rewards") as refused:
                    await ask()
                assert (refused.value.code, refused.value.retry_seconds) == ("banned", None)
            assert service.nodes_view()[0].samples_held == 0
            assert not service.admitted(node.peer_id)
            await trio.sleep(5.0)
            with pytest.raises(Unreachable):
                await node.hello()
        async with strict.serving() as service:
            with pytest.raises(Refused) as refused:
                await node.hello()
            assert refused.value.code == "banned"
            await trio.sleep(5.0)
            with pytest.raises(Unreachable):
                await node.hello()
            service.unban_node(node.peer_id, actor="operator", reason="an appeal")
            assert (await node.hello()).node_state == "probation"


async def test_a_ban_may_end_by_itself(autojump_clock, strict):
    """By the coordinator's clock; what is told counts down."""
    async with strict.serving() as service, strict.node(10) as node:
        await node.hello(strict.token())
        service.ban_node(node.peer_id, actor="operator", reason="odd", expires_seconds=600.0)
        with pytest.raises(Refused, match="for 10 min more: odd"):
            await node.hello()
        await trio.sleep(601.0)
        assert (await node.hello()).node_state == "probation"
        assert events(service, node) == ["joined", "banned", "lapsed"]


async def test_an_operators_suspension_may_end_by_itself(autojump_clock, strict):
    """And can be set anew, with another reason and another end."""
    async with strict.serving() as service, strict.node(10) as node:
        await node.hello(strict.token())
        service.suspend_node(node.peer_id, actor="operator", reason="odd")
        assert service.nodes_view()[0].state_expires is None
        service.suspend_node(node.peer_id, actor="operator", reason="not that odd", expires_seconds=60.0)
        await trio.sleep(30.0)
        assert (await node.heartbeat()).node_reason == "not that odd"
        await trio.sleep(31.0)
        assert service.nodes_view()[0].state == "probation"


async def test_a_node_with_a_price_stands_by_after_its_probation(autojump_clock, strict):
    """It is measured without being activated, and neither counts nor is released before that."""
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        strict.activation = {"prices": {node.peer_id: 0.5}}
    async with strict.serving() as service, strict.learner() as learner, strict.node(10) as node:
        await ready(learner, node, token=strict.token())
        assert service.nodes_view()[0].state == "probation"
        for _ in range(6):
            await node.work()
            await trio.sleep(0.3)
        found = events(service, node)
        assert found[:3] == ["joined", "passed", "released"]
        assert service.nodes_view()[0].mu is not None


async def test_nodes_of_one_address(autojump_clock, strict):
    """A crowded address is full for one more, until one leaves; this machine's own processes are not counted."""
    strict.admission |= {"mode": "open", "nodes_per_address": 2}
    async with strict.serving(), trio.open_nursery():
        async with (
            strict.node_at(10, "192.0.2.1") as a,
            strict.node_at(11, "192.0.2.1") as b,
            strict.node_at(12, "192.0.2.1") as c,
        ):
            await a.hello()
            await b.hello()
            with pytest.raises(Refused, match=r"2 live nodes come from 192\.0\.2\.1/32 already") as refused:
                await c.hello()
            assert (refused.value.code, bool(refused.value.retry_seconds)) == ("address_full", True)
            await b.hello()
            await a.heartbeat()
            await a.heartbeat(state="stopped")
            await c.hello()
        for number in range(20, 24):
            async with strict.node(number) as node:
                await node.hello()


async def test_new_keys_of_one_address(autojump_clock, strict):
    """Endless keys cost their owner, not this process; what was let in may come back."""
    strict.admission |= {"mode": "open", "new_keys_per_hour": 2}
    async with strict.serving() as service:
        for number in range(10, 12):
            async with strict.node_at(number, "192.0.2.1") as node:
                await node.hello()
        for number in range(12, 20):
            async with strict.node_at(number, "192.0.2.1") as node:
                with pytest.raises(Refused) as refused:
                    await node.hello()
                assert (refused.value.code, bool(refused.value.retry_seconds)) == ("too_many_keys", True)
        async with strict.node_at(10, "192.0.2.1") as node:
            await node.hello()
        assert len(service.nodes_view()) == 2


async def test_memory_lets_go_of_those_that_are_silent(autojump_clock, strict, monkeypatch):
    """The ledger knows them: they come back as what they were, and the operator can still act on them."""
    monkeypatch.setattr(admission, "KNOWN_MAX", 3)
    strict.admission |= {"mode": "open"}
    async with strict.serving() as service:
        peers = []
        for number in range(10, 20):
            async with strict.node(number) as node:
                await node.hello()
                peers.append(node.peer_id)
                await trio.sleep(40.0)
        assert len(service.nodes_view()) <= 4
        service.ban_node(peers[0], actor="operator", reason="odd")
        async with strict.node(10) as node:
            with pytest.raises(Refused) as refused:
                await node.hello()
            assert refused.value.code == "banned"
        async with strict.node(11) as node:
            await node.hello()
            assert [move.event for move in service.transitions_view(node.peer_id)] == ["joined"]
        assert len(service.nodes_view()) <= 4


async def test_operators_are_told_what_cannot_be(autojump_clock, strict):
    """An unknown node, a missing reason, a state that has no such way on: nothing is recorded."""
    async with strict.serving() as service, strict.node(10) as node:
        with pytest.raises(KeyError):
            service.ban_node(node.peer_id, actor="operator", reason="odd")
        await node.hello(strict.token())
        before = len(service.events_view())
        with pytest.raises(Refused, match="say why"):
            service.ban_node(node.peer_id, actor="operator", reason=" ")
        for seconds in (0.0, -5.0, float("inf"), float("nan")):
            with pytest.raises(Refused, match="an expiry is a number of seconds from now"):
                service.ban_node(node.peer_id, actor="operator", reason="odd", expires_seconds=seconds)
        with pytest.raises(Refused, match="a node that is probation cannot be unbanned"):
            service.unban_node(node.peer_id, actor="operator", reason="so")
        with pytest.raises(Refused, match="cannot be restored"):
            service.restore_node(node.peer_id, actor="operator", reason="so")
        assert len(service.events_view()) == before
        assert events(service, node) == ["joined"]
