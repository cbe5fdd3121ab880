"""What the coordinator has too much of is split or refused, and no asker pays for it."""

from __future__ import annotations

import pytest
import trio

from echo2.coordinator import broadcasts
from echo2.p2p.errors import Refused
from echo2.p2p.messages import ManifestReply, PublishReply

pytestmark = pytest.mark.slow_on_postgresql

WIDE = "\N{GRINNING FACE}"
"""Four bytes of UTF-8."""


@pytest.mark.parametrize("kind", [PublishReply, ManifestReply])
async def test_a_plan_above_the_bound_of_its_reply_is_no_breach_of_the_askers(
    autojump_clock, world, monkeypatch, caplog, kind
):
    """It is refused for now, with a line in the log; learner and node stay in good standing."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await node.join()
        if kind is ManifestReply:
            manifest_hash, _ = await learner.publish()
        monkeypatch.setattr(kind, "BYTES_MAX", 100)
        with pytest.raises(Refused) as refused:
            await (learner.publish() if kind is PublishReply else node.manifest(manifest_hash))
        assert refused.value.code == "too_large"
        assert refused.value.retry_seconds
        assert world.network.find(world.coordinator.peer_id).offences == {}
        assert world.service.nodes_view()[0].protocol_errors == 0
        assert kind.TYPE in caplog.text


async def test_more_live_nodes_than_a_plan_holds_are_served_all_the_same(autojump_clock, world, monkeypatch):
    """Who is not among those planned gets the plan and a ticket, and takes everything from the root."""
    monkeypatch.setattr(broadcasts, "NODES_MAX", 2)
    async with world.serving(), world.learner() as learner:
        await learner.hello()
        manifest_hash, _ = await learner.publish()
        async with world.node(10) as one, world.node(11) as two, world.node(12) as three:
            plans = []
            for node in (one, two, three):
                await node.join()
                plans.append((await node.manifest(manifest_hash))[0])
            assert [len(plan.entries) for plan in plans] == [1, 2, 2]
            signed = world.service._office.run.current.plan
            await three.manifest(manifest_hash)
            await three.manifest(manifest_hash)
            assert world.service._office.run.current.plan is signed  # not made anew for each of its requests


async def test_receipts_with_long_reasons_come_in_pages_that_fit(autojump_clock, world, tools):
    """An operator may write 512 characters of four bytes each about a node with a thousand rollouts."""
    world.run_settings = {"R": 512, "n": 4, "S": 8, "slice_samples_max": 64}
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.join()
        while not any(lease.kind == "train" for lease in await node.work(wait=1.0)):
            pass
        for _ in range(400):
            if not await node.work(samples=64):
                break
        await trio.sleep(1)
        world.service.suspend_node(node.peer_id, actor="test", reason=WIDE * 512)
        found, after = [], 0
        while page := await node.receipts(after):
            found += page
            after = page[-1].sequence
        assert len(found) > 512
        assert world.network.find(world.coordinator.peer_id).offences == {}
