"""A stop withdraws what the learner never got; what it got, the learner decides."""

from __future__ import annotations

import trio


async def stopped(world, tools, learner, node):
    """A run stopped with four rollouts at the learner, two scored but not fetched, and two out with a node."""
    await learner.hello()
    await learner.publish()
    await node.join()
    await node.work()
    await trio.sleep(0.1)
    given = []
    for _ in range(2):
        leases = (await node.lease(samples=2)).leases
        await node.submit(*map(tools.answer, leases))
        await trio.sleep(0.1)
        given += (await learner.fetch()).rollouts
    assert len(given) == 4
    (lease,) = (await node.lease(samples=2)).leases
    await node.submit(tools.answer(lease))
    (out,) = (await node.lease(samples=2)).leases
    await trio.sleep(0.1)
    world.service.stop_run("r1", actor="operator", reason="enough")
    return given, out


async def test_after_a_stop_the_learner_says_what_became_of_what_it_was_given(autojump_clock, world, tools):
    """Trained on is consumed, though the report comes after the stop; receipts say the same."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        given, out = await stopped(world, tools, learner, node)
        counts = world.run.rollouts
        assert (world.run.state, counts.admitted, counts.withdrawn) == ("stopped", 4, 2)
        assert world.run.waiting == "the learner's word on the 4 rollouts it was given"
        assert (await node.lease()).reason == "the run is stopped"
        assert (await node.submit(tools.answer(out)))[0].reason == "late: the run is stopped"
        reply = await learner.fetch()
        assert (reply.run_state, reply.rollouts) == ("stopped", ())
        await learner.report([tools.done(r) for r in given[:3]] + [tools.done(given[3], "stale", reason="run over")])
        counts = world.run.rollouts
        assert (counts.consumed, counts.stale, counts.withdrawn, counts.admitted) == (3, 1 + 2, 2, 0)
        assert (world.run.state, world.run.waiting) == ("stopped", "")
        states = [receipt.state for receipt in await node.receipts(after=4)]
        assert sorted(states) == ["consumed"] * 3 + ["stale"] * 3 + ["withdrawn"] * 2


async def test_a_learner_that_is_heard_of_is_waited_for(autojump_clock, world, tools):
    """A step may take longer than any bound; a sign of life is enough."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        given, _ = await stopped(world, tools, learner, node)
        for _ in range(10):
            await learner.fetch(wait=20.0)
            await trio.sleep(5.0)
        assert world.run.rollouts.admitted == 4
        await learner.report([tools.done(rollout) for rollout in given])
        assert world.run.rollouts.consumed == 4


async def test_a_silent_learner_has_had_its_say(autojump_clock, world, tools):
    """After two minutes without a word what it was given is withdrawn; what it says later changes nothing."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        given, _ = await stopped(world, tools, learner, node)
        await trio.sleep(119.0)
        assert world.run.rollouts.admitted == 4
        await trio.sleep(2.0)
        assert (world.run.rollouts.admitted, world.run.rollouts.withdrawn) == (0, 6)
        await learner.report([tools.done(rollout) for rollout in given])
        assert (world.run.rollouts.consumed, world.run.rollouts.withdrawn) == (0, 6)


async def test_a_restart_in_between_goes_on_waiting(autojump_clock, world, tools):
    """A coordinator that is killed after the stop still takes the learner's word, and still bounds its silence."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            given, _ = await stopped(world, tools, learner, node)
        async with world.serving():
            assert (world.run.state, world.run.rollouts.admitted) == ("stopped", 4)
            await learner.hello()
            await learner.report([tools.done(given[0])])
            await trio.sleep(125.0)
            counts = world.run.rollouts
            assert (counts.consumed, counts.withdrawn, counts.admitted) == (1, 5, 0)
