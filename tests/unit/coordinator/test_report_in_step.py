"""What a learner says while a step is under way: its batch is taken, its version not yet risen."""

import pytest

from echo2.p2p.errors import Refused
from echo2.p2p.messages import Ack, LearnerReport


async def report(world, learner, version, groups_before):
    message = LearnerReport(
        run="r1", epoch=0, version=version, finished=(), steps=(), status="training", consumed=0,
        groups_before=groups_before,
    )  # fmt: skip
    return await learner.ask("report", message, Ack)


async def test_the_first_steps_groups_are_taken_before_a_step_is_finished(autojump_clock, world):
    """A report sent during the first step names that step's groups under version 0, and is no reason to end."""
    async with world.serving(), world.learner() as learner:
        await learner.hello()
        run = world.config().run
        assert (await report(world, learner, 0, run.R // run.n)).count == 0


async def test_the_last_steps_groups_fit(autojump_clock, world):
    """During the last step as many groups are taken as the run has; one more than it has rollouts is refused."""
    async with world.serving(), world.learner() as learner:
        await learner.hello()
        run = world.config().run
        await report(world, learner, run.steps - 1, run.steps * run.R)
        with pytest.raises(Refused, match="groups fit into"):
            await report(world, learner, run.steps - 1, run.steps * run.R + 1)
