"""The coordinator in a run that publishes adapters: it knows their base, and serves plans for it."""

import pytest
from unit.coordinator.conftest import WALL

from echo2.p2p.chunks import hash_bytes
from echo2.p2p.errors import Refused
from echo2.p2p.identity import payload_hash
from echo2.p2p.manifest import make_manifest
from echo2.p2p.messages import PublishReply, PublishRequest


async def publish(learner, version, base, told=None):
    manifest = make_manifest(
        hash_bytes(f"adapter {version}".encode() * 10),
        run="r1",
        publisher=learner.peer_id,
        epoch=0,
        version=version,
        domain="f32",
        previous_hash=None,
        created_seconds=WALL,
        base_hash=base,
    )
    signed = learner.identity.sign("manifest", manifest)
    await learner.ask("publish", PublishRequest(manifest=signed, base=told), PublishReply)
    return payload_hash(signed)


@pytest.mark.slow_on_postgresql
async def test_an_adapters_base_is_served_beside_it(autojump_clock, world):
    """Both with a plan and a ticket for the asker; an adapter that is no longer the newest is not."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        base, _ = await learner.publish()
        first = await publish(learner, 2, base)
        second = await publish(learner, 4, base)
        await node.hello(world.token())
        for wanted in (base, second):
            plan, _ = await node.manifest(wanted)
            assert plan.manifest_hash == wanted
            assert [entry.node.peer for entry in plan.entries] == [node.peer_id]
            assert plan.root.addresses == learner.transport.addresses
        with pytest.raises(Refused) as refused:
            await node.manifest(first)
        assert refused.value.code == "superseded"


@pytest.mark.slow_on_postgresql
async def test_a_base_that_was_never_published_whole_is_refused(autojump_clock, world):
    """Unknown here, or an adapter itself: no node could use it."""
    async with world.serving(), world.learner() as learner:
        await learner.hello()
        with pytest.raises(Refused, match="published whole"):
            await publish(learner, 2, bytes(32))
        base, _ = await learner.publish()
        adapter = await publish(learner, 2, base)
        with pytest.raises(Refused, match="published whole"):
            await publish(learner, 4, adapter)


@pytest.mark.slow_on_postgresql
async def test_a_ledger_that_has_forgotten_the_base_is_told_of_it(autojump_clock, world):
    """With the adapter, in the bytes it was published in; nothing is leased under it, and it outlives a restart."""
    async with world.serving(), world.learner() as learner:
        await learner.hello()
        told = learner.manifest()
        with pytest.raises(Refused, match="published whole"):
            await publish(learner, 4, payload_hash(told), told=learner.manifest(version=2))
        adapter = await publish(learner, 4, payload_hash(told), told=told)
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        notice = await node.join()
        assert (notice.version, notice.manifest_hash) == (4, adapter)
        _, reply = await node.manifest(payload_hash(told))
        assert reply.manifest == told


async def test_the_base_is_known_after_a_restart(autojump_clock, world):
    """It is in the ledger like every manifest."""
    async with world.serving(), world.learner() as learner:
        await learner.hello()
        base, _ = await learner.publish()
        await publish(learner, 2, base)
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await node.hello(world.token())
        plan, reply = await node.manifest(base)
        assert plan.manifest_hash == base == payload_hash(reply.manifest)
