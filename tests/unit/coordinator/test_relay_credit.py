"""Credit for snapshots passed on: once, as planned, whatever receivers say."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator import accounts, history
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.relay_credit import bytes_on
from echo2.p2p.chunks import chunks_of, extent
from echo2.p2p.messages import Manifest, PlanEdge, Relayed
from echo2.p2p.plan import chunks_on

KEYS = (10, 11, 12)


def relays(world):
    """(relay, bytes, amount) of each posting; the chain holds, and the log tells the tables."""
    with closing(open_ledger(world.url)) as ledger, ledger.reading() as connection:
        assert accounts.verify(connection).fault == ""
        assert history.replay(history.read_bodies(connection)) == history.read_state(connection)
        found = [posting for posting in accounts.read(connection) if posting.kind == "relay"]
    return [(posting.peer, posting.quantity, posting.amount_micros) for posting in found]


async def chained(world, learner, nodes):
    """A snapshot planned as a chain: who is to take how much from whom."""
    await learner.hello()
    for node in nodes:
        await node.hello(world.token())
        await node.heartbeat()
    manifest_hash, _ = await learner.publish()
    planned = {}
    for node in nodes:
        plan, _ = await node.manifest(manifest_hash)
        (entry,) = (entry for entry in plan.entries if entry.node.peer == node.peer_id)
        manifest = world.service._office.run.manifests[manifest_hash].manifest
        planned[node.peer_id] = {
            edge.source: bytes_on(edge, manifest) for edge in entry.edges if edge.source != learner.peer_id
        }
    return manifest_hash, manifest, planned


def claim(manifest_hash, source, length):
    return Relayed(manifest_hash=manifest_hash, source=source, length_bytes=length)


@pytest.fixture
def chain(world):
    world.run_settings = {"broadcast": "chain"}
    world.credit = {"relayed_gib_micros": 1 << 30}
    return world


async def test_a_planned_transfer_is_credited_once(autojump_clock, chain):
    """In each heartbeat it is said again, also to the next coordinator; to the byte, at the operator's rate."""
    async with chain.learner() as learner, chain.node(10) as a, chain.node(11) as b:
        async with chain.serving() as service:
            manifest_hash, _, planned = await chained(chain, learner, (a, b))
            receiver = next(node for node in (a, b) if planned[node.peer_id])
            ((relay, length),) = planned[receiver.peer_id].items()
            receiver.relayed = (claim(manifest_hash, relay, length - 1),)
            for _ in range(3):
                await receiver.heartbeat()
            view = {each.peer: each for each in service.nodes_view()}[relay]
            assert view.balance_credits == (length - 1) / 1e6
        async with chain.serving():
            await receiver.hello()
            await receiver.manifest(manifest_hash)
            receiver.relayed = (claim(manifest_hash, relay, length),)
            await receiver.heartbeat()
    assert relays(chain) == [(relay, length - 1, length - 1)]


async def test_what_was_not_planned_is_not_credited(autojump_clock, chain, tools):
    """A liar names itself, the learner, a stranger, another snapshot, more bytes than planned: the plan decides."""
    async with chain.serving(), chain.learner() as learner, chain.node(10) as a, chain.node(11) as b:
        manifest_hash, manifest, planned = await chained(chain, learner, (a, b))
        receiver = next(node for node in (a, b) if planned[node.peer_id])
        other = a if receiver is b else b
        ((relay, length),) = planned[receiver.peer_id].items()
        most = manifest.length_bytes
        lies = [
            (receiver, claim(manifest_hash, receiver.peer_id, most)),
            (receiver, claim(manifest_hash, learner.peer_id, most)),
            (receiver, claim(manifest_hash, tools.identity(99).peer_id, most)),
            (receiver, claim(bytes(32), relay, most)),
            (other, claim(manifest_hash, receiver.peer_id, most)),
        ]
        for liar, lie in lies:
            if planned[liar.peer_id].get(lie.source) and lie.manifest_hash == manifest_hash:
                continue
            liar.relayed = (lie,)
            await liar.heartbeat()
        assert relays(chain) == []
        receiver.relayed = (claim(manifest_hash, relay, 1 << 40), claim(manifest_hash, relay, length))
        await receiver.heartbeat()
        assert relays(chain) == [(relay, length, length)]


async def test_a_star_credits_nobody(autojump_clock, world):
    """Every byte comes from the learner: what is said of others is not foreseen."""
    world.run_settings = {"broadcast": "star"}
    async with world.serving(), world.learner() as learner, world.node(10) as a, world.node(11) as b:
        manifest_hash, manifest, planned = await chained(world, learner, (a, b))
        assert planned == {a.peer_id: {}, b.peer_id: {}}
        a.relayed = (claim(manifest_hash, b.peer_id, manifest.length_bytes),)
        await a.heartbeat()
    assert relays(world) == []


async def test_of_several_plans_never_more_than_the_snapshot(autojump_clock, chain, tools):
    """The roster changed under way, and the receiver claims all that either plan foresaw."""
    async with chain.serving() as service, chain.learner() as learner, chain.node(10) as a, chain.node(11) as b:
        manifest_hash, manifest, _ = await chained(chain, learner, (a, b))
        sources = [tools.identity(number).peer_id for number in (21, 22, 23)]
        told = service._office.relays._snapshots[manifest_hash].told.setdefault(a.peer_id, {})
        told.update(dict.fromkeys(sources, manifest.length_bytes))
        a.relayed = tuple(claim(manifest_hash, source, manifest.length_bytes - 1) for source in sources)
        await a.heartbeat()
    assert [length for _, length, _ in relays(chain)] == [manifest.length_bytes - 1, 1]


@given(
    length=st.integers(1, 1 << 20),
    chunk=st.integers(1024, 4096),
    first=st.integers(0, 300),
    count=st.integers(0, 300),
    stride=st.integers(1, 5),
)
def test_bytes_on_an_edge(length, chunk, first, count, stride):
    """The sum over its chunks, the last one at its own length."""
    manifest = Manifest.model_construct(length_bytes=length, chunk_bytes=chunk)
    stop = min(first + count, chunks_of(manifest))
    edge = PlanEdge(source="1" * 44, first=min(first, stop), stop=stop, stride=stride)
    assert bytes_on(edge, manifest) == sum(extent(manifest, index)[1] for index in chunks_on(edge))
