"""A learner that comes back from an older state, and one whose run this ledger does not know."""

from __future__ import annotations

import pytest
import trio

from echo2.p2p.errors import Refused
from echo2.p2p.guards import OFFENCES_MAX
from echo2.p2p.messages import Ack, LearnerReport


async def told(learner, epoch, version, finished=(), steps=(), **counts):
    """A report as the learner's software sends it."""
    message = LearnerReport(
        run="r1", epoch=epoch, version=version, finished=tuple(finished), steps=tuple(steps), status="", **counts
    )
    return await learner.ask("report", message, Ack)


async def begun(world, learner, node):
    """Two steps of eight rollouts are trained and reported, version 2 is published and installed."""
    await learner.hello()
    await learner.publish()
    await node.join()
    await node.work()
    await trio.sleep(0.1)
    rollouts = []
    while len(rollouts) < 16:
        await node.work(samples=8, wait=1.0)
        rollouts += (await learner.fetch(wait=1.0)).rollouts
    await learner.train(rollouts[:8])
    await learner.train(rollouts[8:16])
    await learner.publish(version=2)
    await node.join(hello=False)
    return rollouts


@pytest.mark.slow_on_postgresql
async def test_the_learner_is_told_what_the_ledger_knows(autojump_clock, world):
    """The newest manifest, the highest epoch, the last report and sequence; another incarnation after a restart."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            first = (await learner.hello()).standing
            assert (first.epoch, first.published_version) == (None, None)
            await begun(world, learner, node)
            standing = (await learner.hello()).standing
            assert (standing.epoch, standing.published_epoch, standing.published_version) == (0, 0, 2)
            assert (standing.learner_version, standing.admitted_sequence) == (2, 20)
            assert standing.incarnation == first.incarnation
            assert (await node.hello()).standing is None
        async with world.serving():
            again = (await learner.hello()).standing
            assert (again.published_version, again.admitted_sequence) == (2, 20)
            assert again.incarnation != first.incarnation


async def test_a_learner_put_back_goes_on_from_its_version(autojump_clock, world, tools):
    """Its lower version under a higher epoch is current; what was made under the lost one is stale, its leases expire,
    and pacing counts what the steps that stand consumed."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await begun(world, learner, node)
            await node.work(samples=2)
            (out,) = (await node.lease(samples=2)).leases
            await trio.sleep(0.1)
            assert (world.run.rollouts.admitted, out.version) == (4 + 2, 2)  # four of version 0, two of version 2
            await told(learner, 1, 1, consumed=8)
            assert world.run.waiting == "the learner, which was put back, to publish version 1"
            reply = await node.lease()
            assert (reply.leases, reply.reason) == ((), "the learner has lost version 2; wait for its next")
            counts = world.run.rollouts
            assert (counts.consumed, counts.stale, counts.admitted) == (16, 2, 4)
            await learner.publish(epoch=1, version=1)
            assert (world.run.epoch, world.run.version, world.run.learner_version) == (1, 1, 1)
            (ack,) = await node.submit(tools.answer(out))
            assert (ack.state, ack.reason) == ("stale", "late: the learner has lost version 2")
            await node.join(hello=False)
            assert len((await node.lease(samples=8)).leases) > 0
            assert world.run.reserved <= 8 * (1 + 2 + 1)
            assert "learner put back" in [event.action for event in world.service.events_view()]
        async with world.serving():
            await node.join(hello=False)
            assert (world.run.epoch, world.run.version) == (1, 1)


@pytest.mark.slow_on_postgresql
async def test_a_learner_that_lost_everything_is_turned_away(autojump_clock, world):
    """Version 0 again after version 2: refused for good in one line, nothing more is leased, and the pool says why;
    with a checkpoint put back all goes on."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await begun(world, learner, node)
        with pytest.raises(Refused, match="version 2 is published; put a checkpoint of this run back") as refused:
            await told(learner, 1, 0, consumed=0)
        assert refused.value.retry_seconds is None
        with pytest.raises(Refused, match="lost the run"):
            await learner.publish(epoch=1, version=0)
        assert world.run.waiting.startswith("the learner has lost the run: it has no checkpoint")
        assert (await node.lease()).reason == world.run.waiting
        await told(learner, 1, 2, consumed=16)
        await learner.publish(epoch=1, version=2)
        await node.join(hello=False)
        assert (await node.lease(samples=2)).leases


@pytest.mark.slow_on_postgresql
async def test_words_of_a_learner_before_it_was_put_back_change_nothing(autojump_clock, world, tools):
    """A report of the older epoch, late on its way, speaks of steps that are undone; who still says it is to stop."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        rollouts = await begun(world, learner, node)
        await told(learner, 1, 1, consumed=8)
        for _ in range(OFFENCES_MAX + 1):
            with pytest.raises(
                Refused, match="has gone on with this key under epoch 1; stop one of the two"
            ) as refused:
                await told(learner, 0, 3, [tools.done(rollouts[0], step=2)], [tools.metrics(2, 8)])
            assert (refused.value.code, refused.value.retry_seconds) == ("learner_superseded", None)
        assert not world.network.find(world.coordinator.peer_id).offences
        assert world.run.learner_version == 1
        assert [step.step for step in world.run.series] == [0, 1]


async def test_a_ledger_that_knows_no_step_takes_a_run_over(autojump_clock, world):
    """The learner is at version 2: the baseline is of that, of version 3 once that is published instead, and groups
    that were trained on elsewhere are never leased."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await told(learner, 3, 2, consumed=16, groups_before=4)
            await learner.publish(epoch=3, version=2)
            assert world.run.waiting.startswith("baseline evaluation: 0 of 4")
            await learner.publish(epoch=3, version=3)
            assert [(e.version, e.purpose) for e in world.run.evaluations] == [(3, "baseline")]
            await node.join()
            await node.work()
            await trio.sleep(0.1)
            assert world.run.evaluations[0].complete
            assert {lease.ordinal for lease in await node.work(samples=4)} == {4}
        async with world.serving():
            await node.join(hello=False)
            assert min(lease.ordinal for lease in await node.work(samples=4)) == 5


@pytest.mark.slow_on_postgresql
async def test_a_learner_ahead_of_the_ledger_is_answered_at_once(autojump_clock, world):
    """It asks behind a sequence that this ledger never gave: it need not wait to find out."""
    async with world.serving(), world.learner() as learner:
        await learner.publish()
        before = trio.current_time()
        assert not (await learner.fetch(wait=20.0, after=500)).rollouts
        assert trio.current_time() - before < 1.0


@pytest.mark.slow_on_postgresql
async def test_a_learner_that_names_more_groups_than_its_steps_hold_is_refused(autojump_clock, world):
    """They are not listed one by one until memory ends; the next report is served."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await begun(world, learner, node)
        for groups in (25, 2**53):
            with pytest.raises(Refused, match="groups fit into 3 steps"):
                await told(learner, 0, 2, consumed=16, groups_before=groups)
        with pytest.raises(Refused, match="groups fit into"):
            await told(learner, 0, 2**53, consumed=16, groups_before=2**53)
        await told(learner, 0, 2, consumed=16, groups_before=4)
