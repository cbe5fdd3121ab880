"""Learner and coordinator disagree about the past: one of the two was put back to an older state."""

import pytest
import trio
from unit.learner.test_service import COORDINATOR, STEPS, R, World, settled, until

from echo2.p2p import messages as wire
from echo2.p2p.errors import ConfigurationError, Refused


class Ledger:
    """Makes a test's coordinator say what its ledger knows, under a new incarnation at each start."""

    def __init__(self, world):
        self.coordinator, self.starts = world.coordinator, 1
        self.hello = world.coordinator.hello
        world.coordinator.hello = self.answer

    async def answer(self, peer, message):
        welcome = await self.hello(peer, message)
        known = self.coordinator.manifests
        reports = self.coordinator.reports
        standing = wire.Standing(
            incarnation=self.starts.to_bytes(16, "big"),
            epoch=max([m.epoch for m in known] + [r.epoch for r in reports], default=None),
            published_epoch=known[-1].epoch if known else None,
            published_version=known[-1].version if known else None,
            learner_version=reports[-1].version if reports else 0,
            admitted_sequence=len(self.coordinator.rollouts),
        )
        return welcome.model_copy(update={"standing": standing})

    def put_back(self, version, keys):
        """The ledger of when `version` was the newest: of the rollouts in `keys` it knows no end."""
        coordinator = self.coordinator
        self.starts += 1
        coordinator.manifests = [m for m in coordinator.manifests if m.version <= version]
        coordinator.reports = []
        coordinator.states = {key: state for key, state in coordinator.states.items() if key not in keys}


async def test_a_learner_for_which_no_epoch_is_left_says_so(autojump_clock):
    """The highest number there is stands in the ledger: it is named, and nothing is reported under a number beyond."""
    world = World(group_seconds=0.5)
    ledger = Ledger(world)

    async def answer(peer, message):
        welcome = await Ledger.answer(ledger, peer, message)
        return welcome.model_copy(update={"standing": welcome.standing.model_copy(update={"epoch": 2**53})})

    world.coordinator.hello = answer
    with pytest.raises(ExceptionGroup) as caught:
        async with world.pool(), world.learner():
            await trio.sleep(60)
    assert caught.group_contains(ConfigurationError, match="there is none above it")
    assert not world.coordinator.reports


async def test_a_restored_home_takes_an_epoch_above_all_that_the_coordinator_has_seen(autojump_clock):
    """Put back to the checkpoint of version 2 while version 4 is published: it says so first, and publishes 2 anew."""
    world = World(group_seconds=0.5)
    Ledger(world)
    async with world.pool():
        async with world.learner():
            await until(lambda: (0, 2) in world.disk.checkpoints)
            backup = dict(world.disk.checkpoints)
            await until(lambda: world.coordinator.published[-1][1] == 4)
        world.disk.checkpoints = backup
        world.store = type(world.store)()
        reports = len(world.coordinator.reports)
        async with world.learner() as service:
            await until(lambda: len(world.coordinator.published) > 3)
            first = world.coordinator.reports[reports]
            assert (first.epoch, first.version, first.consumed) == (1, 2, 2 * R)
            assert world.coordinator.published[-1] == (1, 2)
            assert service.status().epoch == 1


async def test_a_final_refusal_ends_the_learner_and_leaves_its_home_alone(autojump_clock):
    """The coordinator turns it away for good: one line, and no checkpoint that a restored one would have to beat."""
    world = World()
    Ledger(world)

    async def refuse(peer, message):
        raise Refused("checkpoint_lost", "the learner has lost the run")

    world.coordinator.report = refuse
    with pytest.raises(ExceptionGroup) as caught:
        async with world.pool(), world.learner():
            await trio.sleep(60)
    assert caught.group_contains(ConfigurationError, match="the learner has lost the run")
    assert not world.disk.checkpoints


async def test_a_ledger_put_back_is_told_again(autojump_clock, caplog):
    """It learns of the newest snapshot in the same bytes, and of every consumption again, once; the log says why."""
    world = World(group_seconds=0.5)
    ledger = Ledger(world)
    async with world.learner() as service:
        async with world.pool():
            await until(lambda: world.coordinator.published[-1:] == [(0, 4)] and world.consumed() == 4 * R)
        manifests = world.coordinator.manifests
        consumed = {key for key, state in world.coordinator.states.items() if state == "consumed"}
        ledger.put_back(2, set(list(world.coordinator.states)[R:]))
        async with world.coordinator.on(world.network):
            await until(lambda: world.consumed() >= 4 * R and len(world.coordinator.manifests) >= 3, seconds=300)
            assert world.coordinator.manifests[: len(manifests)] == manifests
            assert consumed <= {key for key, state in world.coordinator.states.items() if state == "consumed"}
        async with world.pool():
            await settled(service)
            world.check_finished_run()
    assert "the coordinator's ledger is older than it was" in caplog.text
    assert "version 4 of epoch 0 was published" in caplog.text


async def test_a_restart_that_forgot_nothing_changes_nothing(autojump_clock, caplog):
    """Asking for everything again after a restart brings no second decision."""
    world = World(group_seconds=0.5)
    ledger = Ledger(world)
    async with world.learner() as service:
        for _ in range(4):
            ledger.starts += 1
            async with world.pool():
                await trio.sleep(20)
        async with world.pool():
            await settled(service)
            world.check_finished_run()
            assert service.status().dropped == {}
    assert "older than it was" not in caplog.text
    assert world.coordinator.address.peer == COORDINATOR.peer_id
    assert service.status().version == STEPS
