from __future__ import annotations

from contextlib import AsyncExitStack, closing

import pytest
import trio

from echo2.coordinator.lateness import REMEMBERED_SECONDS
from echo2.coordinator.ledger import open_ledger
from echo2.p2p.errors import ConfigurationError, Refused, Unreachable
from echo2.p2p.messages import Ack


async def baseline(world, learner, node):
    """Publish version 0 and answer the held-out prompts."""
    await learner.hello()
    await learner.publish()
    await node.join()
    leases = await node.work()
    assert {lease.kind for lease in leases} == {"eval"}
    await trio.testing.wait_all_tasks_blocked(0.1)
    assert world.run.evaluations[0].complete


async def fetch(learner, count):
    rollouts = []
    with trio.fail_after(100.0):
        while len(rollouts) < count:
            rollouts += (await learner.fetch(wait=20.0)).rollouts
    return rollouts


async def produce(node, count):
    """A node's rounds until it has delivered so many samples: a node of unknown speed gets few at once."""
    while count > 0:
        count -= sum(lease.sample_count for lease in await node.work(samples=count, wait=1.0))


async def test_a_run_from_the_first_snapshot_to_the_end(autojump_clock, world, tools):
    """Baseline, four steps, final evaluation, finished; every rollout has one terminal state and a receipt."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        assert world.run.waiting == "no snapshot published yet; the learner has not been heard of"
        await baseline(world, learner, node)
        assert world.run.evaluations[0].mean == 1.0
        for version in range(1, 5):
            while len(learner.consumed) < 8:
                await node.work()
                learner.consumed += (await learner.fetch(wait=1.0)).rollouts
            batch, learner.consumed = learner.consumed[:8], learner.consumed[8:]
            await learner.train(batch)
            await learner.publish(version=version)
            await node.join(hello=False)
        assert world.run.waiting == "final evaluation: 0 of 4"
        await node.work()
        await trio.sleep(1.0)
        view = world.run
        assert (view.state, view.waiting, view.learner_version) == ("finished", "", 4)
        assert [(e.purpose, e.version, e.count, e.mean) for e in view.evaluations] == [
            ("baseline", 0, 4, 1.0),
            ("final", 4, 4, 1.0),
        ]
        counts = view.rollouts
        assert counts.consumed == 32
        assert counts.submitted == counts.consumed + counts.withdrawn
        receipts = await node.receipts()
        assert [r.sequence for r in receipts] == list(range(1, counts.submitted + 8 + 1))
        assert len({(r.lease_id, r.sample) for r in receipts}) == len(receipts)
        assert (await learner.fetch()).run_state == "finished"
        assert (await node.lease()).reason == "the run is finished"


async def test_a_new_node_needs_a_token_and_a_known_one_does_not(autojump_clock, world):
    """Missing, unknown, spent and expired tokens are told apart; the key alone lets a known node in again."""
    async with world.serving(), world.node(10) as first, world.node(11) as second:
        codes = []
        for token in ("", "nonsense"):
            with pytest.raises(Refused) as refused:
                await first.hello(token)
            codes.append(refused.value.code)
        single = world.token(uses=1)
        welcome = await first.hello(single)
        assert (welcome.node_state, welcome.heartbeat_seconds) == ("active", 10.0)
        await first.hello()
        for token in (single, world.token(expires_seconds=0.0)):
            with pytest.raises(Refused) as refused:
                await second.hello(token)
            codes.append(refused.value.code)
        assert codes == ["token_missing", "token_unknown", "token_spent", "token_expired"]
        with pytest.raises(Refused) as refused:
            await second.heartbeat()
        assert refused.value.code == "hello_first"


@pytest.mark.slow_on_postgresql
async def test_a_node_too_old_is_told_what_it_needs(autojump_clock, world):
    """Without a common wire version the refusal names ours."""
    async with world.serving(), world.node(10) as node:
        with pytest.raises(Refused, match="speaks wire version 1") as refused:
            await node.hello(world.token(), versions=(0,))
        assert (refused.value.code, refused.value.retry_seconds) == ("wire_version", None)


@pytest.mark.slow_on_postgresql
async def test_only_the_configured_key_is_the_learner(autojump_clock, world):
    """Another key is refused the role and every request of it."""
    async with world.serving(), world.learner(3) as other:
        for request in (other.hello, other.fetch, other.report, other.publish):
            with pytest.raises(Refused) as refused:
                await request()
            assert refused.value.code == "not_the_learner"
        assert world.run.learner_version == 0


async def test_a_held_heartbeat_is_answered_when_a_snapshot_is_published(autojump_clock, world):
    """The reply waits for news and comes with it, well before the hold is over."""
    async with world.serving(), world.learner() as learner, world.node(10) as node, trio.open_nursery() as nursery:
        await node.hello(world.token())
        await node.heartbeat()
        started = trio.current_time()
        notices = []

        async def wait():
            notices.append(await node.heartbeat(hold=10.0))
            notices.append(trio.current_time() - started)

        nursery.start_soon(wait)
        await trio.sleep(3.0)
        manifest_hash, _ = await learner.publish()
        await trio.sleep(0.5)
        notice, seconds = notices
        assert (notice.version, notice.manifest_hash) == (0, manifest_hash)
        assert 3.0 < seconds < 3.5


@pytest.mark.slow_on_postgresql
async def test_a_held_heartbeat_without_news_comes_back_after_its_hold(autojump_clock, world):
    """The hold is bounded by what the node asked for."""
    async with world.serving(), world.node(10) as node:
        await node.join()
        started = trio.current_time()
        await node.heartbeat(hold=5.0)
        assert trio.current_time() - started == pytest.approx(5.0, abs=0.1)


async def test_a_node_is_late_then_dead_and_its_leases_go_to_others(autojump_clock, world):
    """Three missed heartbeats; what it held is reissued long before the lease's own duration is over."""
    world.run_settings = {"lease_seconds": 3600.0}
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await baseline(world, learner, node)
        (lease, *_) = (await node.lease(samples=2)).leases
        await trio.sleep(20.0)
        assert [view.health for view in world.service.nodes_view()] == ["late"]
        await trio.sleep(15.0)
        assert world.service.nodes_view()[0].health == "dead"
        await other.join()
        (again, *_) = (await other.lease(samples=2)).leases
        assert (again.ordinal, again.sample_first, again.seed) == (lease.ordinal, lease.sample_first, lease.seed)
        assert again.lease_id != lease.lease_id


async def test_a_restarted_node_frees_what_it_held_at_once(autojump_clock, world):
    """A new session cannot go on with the leases of the one before."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        await node.lease(samples=2)
        assert world.service.nodes_view()[0].samples_held == 2
        await trio.sleep(40.0)
        await node.heartbeat(session=b"2" * 16)
        assert world.service.nodes_view()[0].samples_held == 0


async def test_leases_whose_reply_was_lost_are_freed(autojump_clock, world):
    """A node that says twice that it holds nothing never got them."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        await node.lease(samples=2)
        await node.heartbeat(held=0)
        await node.heartbeat(held=0)
        assert world.service.nodes_view()[0].samples_held == 2
        await trio.sleep(6.0)
        await node.heartbeat(held=0)
        assert world.service.nodes_view()[0].samples_held == 0


async def test_resending_a_slice_is_acknowledged_again_and_counted_once(autojump_clock, world, tools):
    """The acknowledgement is lost, the node sends again: same answer, one rollout."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        (lease, *_) = (await node.lease(samples=2)).leases
        first = await node.submit(tools.answer(lease))
        twice = await node.submit(tools.answer(lease), tools.answer(lease))
        assert [ack.lease_id for ack in (*first, *twice)] == [lease.lease_id] * 3
        assert first[0].state == "held"
        assert {ack.state for ack in twice} <= {"held", "admitted"}
        assert world.run.rollouts.submitted == 2


async def test_the_same_lease_twice_in_one_request_counts_once(autojump_clock, world, tools):
    """Both copies are acknowledged."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        (lease, *_) = (await node.lease(samples=2)).leases
        acks = await node.submit(tools.answer(lease), tools.answer(lease))
        assert [ack.state for ack in acks] == ["held", "held"]
        assert world.run.rollouts.submitted == 2


async def test_a_bad_slice_is_rejected_whole_with_receipts_and_given_out_again(autojump_clock, world, tools):
    """One bad sample rejects its slice; the node reads why; the slot goes to somebody else."""
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await baseline(world, learner, node)
        (lease, *_) = (await node.lease(samples=2)).leases
        (ack,) = await node.submit(tools.answer(lease, digits=[99]))
        assert (ack.state, ack.reason.partition(":")[0]) == ("rejected", "token_range")
        receipts = await node.receipts(after=4)
        assert [(r.state, r.reason.partition(":")[0]) for r in receipts] == [("rejected", "token_range")] * 2
        await other.join()
        (again, *_) = (await other.lease(samples=2)).leases
        assert (again.ordinal, again.sample_first) == (lease.ordinal, lease.sample_first)
        view = world.service.nodes_view()[0]
        assert (view.rejected, view.accepted) == (2, 0)
        assert view.reason.startswith("token_range")
        assert world.service.pool_view().refused == {"rejected: token_range": 2}


async def test_another_nodes_lease_is_refused(autojump_clock, world, tools):
    """Stolen lease ids are worth nothing, and nothing is recorded."""
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as thief:
        await baseline(world, learner, node)
        await thief.join()
        (lease, *_) = (await node.lease(samples=2)).leases
        (ack,) = await thief.submit(tools.answer(lease))
        assert (ack.state, ack.reason) == ("rejected", "lease: the lease was given to another node")
        assert world.run.rollouts.submitted == 0


async def test_a_reissue_that_loses_the_race_is_a_duplicate(autojump_clock, world, tools):
    """First to arrive wins; the other gets a receipt that says so."""
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await baseline(world, learner, node)
        await other.join()
        (lease, *_) = (await node.lease(samples=2)).leases
        for _ in range(7):
            await trio.sleep(10.0)
            await node.heartbeat(held=1)
            await other.heartbeat()
        (again, *_) = (await other.lease(samples=2)).leases
        assert (await node.submit(tools.answer(lease)))[0].state == "held"
        (ack,) = await other.submit(tools.answer(again))
        assert ack.state == "duplicate"
        counts = world.run.rollouts
        assert (counts.submitted, counts.duplicate) == (4, 2)
        assert [r.state for r in await other.receipts()] == ["duplicate"] * 2


async def test_a_node_that_is_always_refused_rests(autojump_clock, world, tools):
    """Eight refused slices in a row: half a minute without leases, the reason in the reply and in the view."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        for _ in range(8):
            (lease,) = (await node.lease(samples=2)).leases
            await node.submit(tools.answer(lease, digits=[99]))
        reply = await node.lease(samples=2)
        assert (reply.leases, reply.reason.partition(":")[0]) == ((), "resting 30 s")
        assert world.service.nodes_view()[0].reason.startswith("resting 30 s: token_range")
        assert (await node.lease(samples=2, wait=25.0)).leases == ()
        assert (await node.lease(samples=2, wait=25.0)).leases


@pytest.mark.slow_on_postgresql
async def test_a_lease_request_waits_for_work(autojump_clock, world, tools):
    """While pacing is at its bound the request is held; a step makes room and it is answered."""
    async with world.serving(), world.learner() as learner, world.node(10) as node, trio.open_nursery() as nursery:
        await baseline(world, learner, node)
        while await node.work():
            pass
        assert world.run.waiting == "pacing: 24 of 24 under version 0"
        assert (await node.lease()).reason == "pacing: 24 of 24 under version 0"
        replies = []

        async def wait():
            replies.append(await node.lease(wait=25.0))

        nursery.start_soon(wait)
        await trio.sleep(1.0)
        assert not replies
        rollouts = await fetch(learner, 24)
        await learner.report([tools.done(rollouts[0], "stale", step=3, reason="staleness 3 is above 2")])
        await trio.sleep(0.1)
        assert [lease.sample_count for lease in replies[0].leases] == [1]


async def test_admitted_rollouts_come_in_order_with_rewards(autojump_clock, world, tools):
    """Sequences rise by one; a wrong answer has reward 0; the learner may ask again from any sequence."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        right, wrong = (await node.lease(samples=4)).leases
        await node.submit(tools.answer(right), tools.answer(wrong, digits=[11]))
        rollouts = await fetch(learner, 4)
        assert [r.sequence for r in rollouts] == [1, 2, 3, 4]
        assert [r.reward for r in rollouts] == [1.0, 1.0, 0.0, 0.0]
        assert (await learner.fetch(after=2)).rollouts == tuple(rollouts[2:])
        assert [r.sequence for r in (await learner.fetch(after=0, most=3)).rollouts] == [1, 2, 3]


async def test_a_report_can_be_repeated(autojump_clock, world, tools):
    """The acknowledgement is lost, the learner reports again: nothing is counted twice, the first state stands."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        await produce(node, 8)
        rollouts = await fetch(learner, 8)
        await learner.train(rollouts)
        before = world.run
        await learner.report([tools.done(r, "stale") for r in rollouts], [tools.metrics(0, 8)])
        assert world.run == before
        assert before.rollouts.consumed == 8
        assert [r.state for r in await node.receipts(after=4)] == ["consumed"] * 8
        assert (before.bubble, before.t_train_seconds) == (0.0, 2.0), "nothing could overlap with the first wait"
        await learner.report(steps=[tools.metrics(1, 8), tools.metrics(2, 8)])
        assert world.run.bubble == pytest.approx(2 / 8)


async def test_publish_is_ordered_and_can_be_repeated(autojump_clock, world):
    """The same manifest again is answered; one that is not above the highest is refused."""
    async with world.serving(), world.learner() as learner:
        first, _ = await learner.publish(version=1)
        assert (await learner.publish(version=1))[0] == first
        with pytest.raises(Refused) as refused:
            await learner.publish(version=0)
        assert refused.value.code == "stale_manifest"
        await learner.publish(epoch=1, version=1)
        assert (world.run.epoch, world.run.version) == (1, 1)
        with pytest.raises(Refused, match="the run ends with version 4"):
            await learner.publish(epoch=1, version=5)


@pytest.mark.slow_on_postgresql
async def test_an_address_that_is_only_claimed_makes_nobody_a_source(autojump_clock, world):
    """The plan and the views have proved addresses alone; new proofs make a new plan."""
    found = {}
    world.proved = lambda peer, claimed: tuple(one for one in claimed if one in found.get(peer, ()))
    world.run_settings = {"broadcast": "chain"}
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await learner.hello()
        manifest_hash, _ = await learner.publish()
        for one in (node, other):
            await one.hello(world.token())
        plan, _ = await other.manifest(manifest_hash)
        assert {edge.source for entry in plan.entries for edge in entry.edges} == {learner.peer_id}
        assert [view.reachable for view in world.service.nodes_view()] == [False, False]
        found[node.peer_id] = node.transport.addresses
        world.service.forget_plan()
        plan, _ = await other.manifest(manifest_hash)
        sources = {entry.node.peer: {edge.source for edge in entry.edges} for entry in plan.entries}
        assert sources == {node.peer_id: {learner.peer_id}, other.peer_id: {node.peer_id}}
        assert [(view.reachable, view.addresses) for view in world.service.nodes_view()] == [
            (True, node.transport.addresses),
            (False, ()),
        ]


@pytest.mark.slow_on_postgresql
async def test_the_relay_and_the_dial_back_are_for_admitted_peers(autojump_clock, world):
    """The learner and active nodes; not strangers, not the suspended."""
    async with world.serving(), world.node(10) as node, world.learner() as learner:
        assert world.service.admitted(learner.peer_id)
        assert not world.service.admitted(node.peer_id)
        await node.hello(world.token())
        assert world.service.admitted(node.peer_id)
        world.service.suspend_node(node.peer_id, actor="test", reason="test")
        assert not world.service.admitted(node.peer_id)


@pytest.mark.slow_on_postgresql
async def test_a_breach_is_held_against_its_peer_at_the_transport(autojump_clock, world):
    """So that a peer which goes on with it is refused, whatever key to the pool it has."""
    async with world.serving(), world.node(10) as node:
        with pytest.raises(Unreachable):
            await node.ask("leases", Ack(), Ack)
        coordinator = world.network.find(world.coordinator.peer_id)
        assert coordinator.offences == {node.peer_id: 1}


@pytest.mark.slow_on_postgresql
async def test_a_late_joiner_is_in_the_plan_it_is_sent(autojump_clock, world):
    """The plan made at publish knew no node; the one sent to the asker has it, and its ticket."""
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await learner.hello()
        manifest_hash, plan = await learner.publish()
        assert plan.entries == ()
        await node.hello(world.token())
        plan, _ = await node.manifest(manifest_hash)
        assert [entry.node.peer for entry in plan.entries] == [node.peer_id]
        assert plan.root.addresses == learner.transport.addresses
        await other.hello(world.token())
        plan, _ = await other.manifest(manifest_hash)
        assert {entry.node.peer for entry in plan.entries} == {node.peer_id, other.peer_id}
        with pytest.raises(Refused) as refused:
            await node.manifest(b"x" * 32)
        assert refused.value.code == "superseded"


async def test_t_bcast_is_measured_to_the_quorum(autojump_clock, world):
    """From publish until the nodes have said that they can generate with it."""
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await node.join()
        await other.join()
        manifest_hash, _ = await learner.publish()
        await trio.sleep(2.0)
        await node.heartbeat(manifest=manifest_hash)
        assert world.run.t_bcast_seconds is None
        await trio.sleep(1.0)
        await other.heartbeat(manifest=manifest_hash)
        assert world.run.t_bcast_seconds == pytest.approx(3.0, abs=0.1)


@pytest.mark.slow_on_postgresql
async def test_a_paused_node_is_not_waited_for(autojump_clock, world):
    """T_bcast and the plan leave out a node that says it is paused: it installs nothing."""
    async with world.serving(), world.learner() as learner, world.node(10) as busy, world.node(11) as paused:
        await learner.hello()
        for node in (busy, paused):
            await node.join()
        await paused.heartbeat(state="paused")
        manifest_hash, plan = await learner.publish()
        assert [entry.node.peer for entry in plan.entries] == [busy.peer_id]
        busy.installed = manifest_hash
        await busy.heartbeat()
        assert world.run.t_bcast_seconds == pytest.approx(0.0, abs=1.0)


async def test_a_suspended_nodes_rollouts_are_withdrawn(autojump_clock, world, tools):
    """What the learner has not seen is withdrawn at once; what it may have, it is asked to; the group is refilled."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await baseline(world, learner, node)
        await produce(node, 4)
        seen = await fetch(learner, 4)
        await produce(node, 2)
        await trio.sleep(0.1)
        service.suspend_node(node.peer_id, actor="operator", reason="forged")
        assert world.run.rollouts.withdrawn == 2
        reply = await learner.fetch(wait=20.0)
        assert {(k.lease_id, k.sample) for k in reply.withdraw} == {(r.lease_id, r.sample) for r in seen}
        await learner.report([tools.done(r, "withdrawn") for r in seen[:3]] + [tools.done(seen[3], "consumed")])
        assert (world.run.rollouts.withdrawn, world.run.rollouts.consumed) == (5, 1)
        assert (await learner.fetch()).withdraw == ()
        assert (await node.lease()).reason == "suspended: forged"
        await other.join()
        (lease, *_) = (await other.lease(samples=2)).leases
        assert lease.ordinal == 1, "group 0 was trained on, group 1 is to be refilled"
        with pytest.raises(Refused, match="forged"):
            await node.submit(tools.answer(lease))
        states = [r.state for r in await node.receipts(after=4)]
        assert sorted(states) == ["consumed"] + ["withdrawn"] * 5
        events = [(event.actor, event.action, event.reason) for event in service.events_view()]
        assert ("operator", "node suspended", "forged") in events


async def test_pause_resume_and_stop(autojump_clock, world, tools):
    """Paused: no leases, with the operator's reason; resumed: leases; stopped: what is left is withdrawn, for good."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        service.pause_run("r1", actor="operator", reason="prices")
        assert world.run.waiting == "paused: prices"
        assert (await node.lease()).reason == "the run is paused: prices"
        service.resume_run("r1", actor="operator", reason="cheap again")
        await produce(node, 4)
        (out,) = (await node.lease(samples=2)).leases
        await trio.sleep(0.1)
        service.stop_run("r1", actor="operator", reason="enough")
        assert (world.run.state, world.run.rollouts.withdrawn) == ("stopped", 4)
        assert (await learner.fetch(wait=20.0)).run_state == "stopped"
        (ack,) = await node.submit(tools.answer(out))
        assert (ack.state, ack.reason) == ("stale", "late: the run is stopped")
        with pytest.raises(Refused, match="the run is stopped"):
            service.resume_run("r1", actor="operator", reason="again")
        with pytest.raises(KeyError):
            service.pause_run("other", actor="operator", reason="")


@pytest.mark.slow_on_postgresql
async def test_the_pool_says_why_nothing_moves(autojump_clock, world):
    """Each wait has its reason in the run's view."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        assert world.run.waiting == "no snapshot published yet"
        await learner.publish()
        assert world.run.waiting == "baseline evaluation: 0 of 4; no live node in the pool"
        await node.join()
        assert world.run.waiting == "baseline evaluation: 0 of 4"
        await node.work()
        await trio.sleep(0.2)
        assert world.run.waiting == ""
        await trio.sleep(60.0)
        assert world.run.waiting == "no live node in the pool"
        await node.heartbeat(state="paused")
        assert world.run.waiting == "nodes that can work: of 1 live, 1 paused"
        await node.heartbeat(state="stalled")
        assert world.run.waiting == "nodes that can work: of 1 live, 1 stalled"
        await node.heartbeat(state="blocked")
        assert world.run.waiting == "nodes that can work: of 1 live, 1 blocked"
        await node.heartbeat()
        assert world.run.waiting == ""


@pytest.mark.slow_on_postgresql
async def test_what_keeps_the_learner_is_told_where_the_run_waits_for_it(autojump_clock, world):
    """Pacing alone would look like a busy learner; its own words say that its disk is full."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await baseline(world, learner, node)
        while await node.work():
            pass
        assert world.run.waiting == "pacing: 24 of 24 under version 0"
        await learner.report(status="the disk: No space left on device")
        assert world.run.waiting == (
            "pacing: 24 of 24 under version 0; the learner waits for the disk: No space left on device"
        )


async def test_changed_terms_of_a_run_are_refused(autojump_clock, world):
    """A ledger's run cannot go on under another group size."""
    async with world.serving():
        pass
    world.run_settings = {"n": 8}
    async with world.network.transport(world.coordinator) as transport:
        with closing(open_ledger(world.url)) as ledger, pytest.raises(ConfigurationError) as refused:
            world.make(ledger, transport)
    assert "begun with n = 4, the configuration now says 8" in str(refused.value)


@pytest.mark.slow_on_postgresql
async def test_an_empty_pool_is_no_slow_broadcast(autojump_clock, world):
    """The first node joins an hour after the snapshot: T_bcast counts from then."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.publish()
        await trio.sleep(3600.0)
        await node.join()
        assert world.run.t_bcast_seconds == pytest.approx(0.0, abs=1.0)


@pytest.mark.slow_on_postgresql
async def test_a_relay_that_lets_others_wait_becomes_a_leaf(autojump_clock, world):
    """Two nodes' word, said with their next sign of life, counts in the next plan, and no longer ten minutes later."""
    async with world.serving(), world.learner() as learner, AsyncExitStack() as stack:
        await learner.hello()
        nodes = [await stack.enter_async_context(world.node(number)) for number in (10, 11, 12)]
        for node in nodes:
            await node.hello(world.token())
            await node.heartbeat()
        slow, *others = nodes

        async def leaves():
            learner.version += 1
            _, plan = await learner.publish(version=learner.version)
            return {entry.node.peer for entry in plan.entries if not entry.node.addresses}

        assert await leaves() == set()
        await others[0].heartbeat(late=[slow.peer_id, learner.peer_id])
        assert await leaves() == set()
        await others[1].heartbeat(late=[slow.peer_id, learner.peer_id])
        assert await leaves() == {slow.peer_id}
        view = next(node for node in world.service.nodes_view() if node.peer == slow.peer_id)
        assert "relays nothing for a while" in view.reason
        await trio.sleep(REMEMBERED_SECONDS)
        for node in nodes:
            await node.heartbeat()
        assert await leaves() == set()
