"""Evaluations while a run trains: they begin, count for their own version, and end, with a reason if early."""

import pytest
import trio


@pytest.fixture
def evaluated(world):
    world.run_settings = {"eval_every": 1, "eval_samples": 2, "eval_share": 0.5, "steps": 8}
    return world


def shown(world):
    return [(one.version, one.purpose, one.count, one.size, one.complete) for one in world.run.evaluations]


async def begin(world, learner, node):
    await learner.hello()
    await learner.publish()
    await node.join()
    while not world.run.evaluations[0].complete:
        await node.work()
        await trio.sleep(1.0)


async def step(world, learner, node, *, digits=None, tools):
    """Lease and answer until a step's rollouts are there, train on them, publish."""
    while len(learner.consumed) < 8:
        leases = (await node.lease(4)).leases
        await node.submit(*(tools.answer(lease, digits if lease.kind == "eval" else None) for lease in leases))
        learner.consumed += (await learner.fetch(wait=1.0)).rollouts
    batch, learner.consumed = learner.consumed[:8], learner.consumed[8:]
    await learner.train(batch)
    await learner.publish(version=learner.version)


async def test_a_baseline_asks_each_prompt_k_times(autojump_clock, evaluated):
    """Four prompts, two answers each: avg@2."""
    async with evaluated.serving(), evaluated.learner() as learner, evaluated.node(10) as node:
        await begin(evaluated, learner, node)
        assert shown(evaluated) == [(0, "baseline", 8, 8, True)]
        assert evaluated.run.evaluations[0].samples == 2
        assert evaluated.run.evaluated == 8


async def test_answers_count_for_the_version_they_were_leased_under(autojump_clock, evaluated, tools):
    """The node moves on with an answer of version 1 in hand: it counts for that version, which waits for it."""
    async with evaluated.serving(), evaluated.learner() as learner, evaluated.node(10) as node:
        await begin(evaluated, learner, node)
        await step(evaluated, learner, node, tools=tools)
        await node.join(hello=False)
        held = []
        while not held:
            leases = (await node.lease(2)).leases
            held = [lease for lease in leases if lease.kind == "eval"]
            if not held:
                await node.submit(*map(tools.answer, leases))
        await step(evaluated, learner, node, digits=[9], tools=tools)  # right ones are out, the rest are wrong
        await node.join(hello=False)
        await step(evaluated, learner, node, digits=[9], tools=tools)
        wrong = evaluated.run.evaluations[1].count
        await node.submit(*map(tools.answer, held))
        await trio.sleep(1.0)
        first, last = evaluated.run.evaluations[1:]
        right = sum(lease.sample_count for lease in held)
        assert (first.version, first.count, first.mean) == (1, right + wrong, right / (right + wrong))
        assert (last.version, last.count) == (evaluated.run.version, 0)  # begun when the one before was over


async def test_a_version_that_no_node_has_any_more_is_not_waited_for(autojump_clock, evaluated, tools):
    """The node installs version 2 with nothing of version 1 out: that evaluation ends with its reason."""
    async with evaluated.serving(), evaluated.learner() as learner, evaluated.node(10) as node:
        await begin(evaluated, learner, node)
        await step(evaluated, learner, node, tools=tools)  # the node still has version 0: nothing is evaluated
        await step(evaluated, learner, node, tools=tools)
        assert shown(evaluated)[1] == (1, "interim", 0, 8, False)
        await node.join(hello=False)
        await trio.sleep(1.0)
        view = evaluated.run.evaluations[1]
        assert view.reason == "no node has version 1 any more, version 2 is published; 0 of 8 answered"
        assert shown(evaluated)[2] == (2, "interim", 0, 8, False)
        assert "evaluation" not in evaluated.run.waiting
        events = evaluated.service.events_view(limit=5)
        assert any("no node has version 1" in event.reason for event in events)


async def test_evaluations_under_way_and_over_outlive_the_coordinator(autojump_clock, evaluated, tools):
    """After a kill the one goes on where it was, and the other keeps its numbers and its reason."""
    async with evaluated.learner() as learner, evaluated.node(10) as node:
        async with evaluated.serving():
            await begin(evaluated, learner, node)
            await step(evaluated, learner, node, tools=tools)
            await step(evaluated, learner, node, tools=tools)
            await node.join(hello=False)
            await trio.sleep(1.0)
            while not evaluated.run.evaluations[2].count:
                await node.work(samples=2)
                await trio.sleep(0.5)
            before = evaluated.run.evaluations
        async with evaluated.serving():
            assert evaluated.run.evaluations == before
            await learner.hello()
            await node.join(hello=False)
            for _ in range(20):  # nobody trains: pacing soon leaves the node idle
                await node.work(samples=4)
                await trio.sleep(0.5)
            assert shown(evaluated)[2] == (2, "interim", 8, 8, True)


async def test_a_stop_ends_an_evaluation_under_way(autojump_clock, evaluated, tools):
    """With the run's end as its reason."""
    async with evaluated.serving(), evaluated.learner() as learner, evaluated.node(10) as node:
        await begin(evaluated, learner, node)
        await step(evaluated, learner, node, tools=tools)
        evaluated.service.stop_run("r1", actor="test", reason="enough")
        assert evaluated.run.evaluations[1].reason == "the run is stopped"


async def test_an_evaluation_of_a_lost_version_is_forgotten(autojump_clock, evaluated, tools):
    """The learner is put back below it: the version comes again, and is evaluated again."""
    async with evaluated.serving(), evaluated.learner() as learner, evaluated.node(10) as node:
        await begin(evaluated, learner, node)
        for _ in range(2):
            await step(evaluated, learner, node, tools=tools)
            await node.join(hello=False)
        await trio.sleep(1.0)
        assert [one.version for one in evaluated.run.evaluations] == [0, 1, 2]
        learner.epoch, learner.version, learner.consumed = 1, 1, []
        await learner.report()
        await learner.publish(epoch=1, version=1)
        await trio.sleep(1.0)
        assert [one.version for one in evaluated.run.evaluations] == [0, 1]
