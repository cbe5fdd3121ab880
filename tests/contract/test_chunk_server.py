"""Whom a holder serves, how often, and how long it waits."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from contract.snapshot_pool import (
    CHUNK,
    CHUNKS,
    COORDINATOR,
    ROOT,
    RUN,
    A,
    B,
    C,
    MemoryWorld,
    SocketWorld,
    ask,
    put,
    signed_manifest,
    ticket_for,
)

from echo2.p2p.channel import Channel
from echo2.p2p.chunk_server import SERVINGS_FORGET_SECONDS, STREAMS_PER_PEER_MAX
from echo2.p2p.codec import END, encode_frame
from echo2.p2p.errors import ProtocolError, Refused, SchemaViolation, UnexpectedMessage, Unreachable
from echo2.p2p.identity import payload_hash
from echo2.p2p.messages import CHUNKS_MAX, ChunkRequest, Refusal, Ticket


@pytest.fixture(params=[MemoryWorld, SocketWorld], ids=["memory", "sockets"])
def world(request, tmp_path):
    return request.param(tmp_path)


@pytest.fixture
def memory(tmp_path):
    return MemoryWorld(tmp_path)


@pytest.fixture
def clock(request):
    """The world's: pytest-trio finds a virtual clock among a test's arguments."""
    name = "world" if "world" in request.fixturenames else "memory"
    return request.getfixturevalue(name).clock


async def test_tickets(world, clock):
    """A ticket for another peer or snapshot, or not signed by the coordinator, gets no chunk and is complained of."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with world.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        wrong = [
            ticket_for(B.peer_id, manifest_hash),
            ticket_for(node.id, bytes(32)),
            ticket_for(node.id, manifest_hash, signer=C),
            COORDINATOR.sign("plan", Ticket(run=RUN, manifest_hash=manifest_hash, peer=node.id)),
        ]
        for ticket in wrong:
            with pytest.raises(Refused) as refused:
                await ask(node, root, manifest_hash, ticket=ticket)
            assert refused.value.code == "ticket"
        assert [peer for peer, _ in root.complaints] == [node.id] * 4
        assert sum(traffic.sent_bytes for traffic in root.broadcaster.traffic.values()) == 0
        assert len(await ask(node, root, manifest_hash, ticket=ticket_for(node.id, manifest_hash))) == CHUNKS


async def test_third_time(memory, clock):
    """A chunk is sent to one peer twice; the third time it is refused, and what was not had twice still comes."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with memory.peers(ROOT, A, B) as (root, node, other):
        await put(root, signed, manifest)
        ticket = ticket_for(node.id, manifest_hash)
        for _ in range(2):
            assert await ask(node, root, manifest_hash, ticket=ticket, stop=4) == [0, 1, 2, 3]
        with pytest.raises(Refused) as refused:
            await ask(node, root, manifest_hash, ticket=ticket, stop=4)
        assert refused.value.code == "served-twice"
        before = root.broadcaster.traffic[node.id].sent_bytes
        with pytest.raises(Refused):
            await ask(node, root, manifest_hash, ticket=ticket, stop=6)
        assert root.broadcaster.traffic[node.id].sent_bytes == before + 2 * CHUNK
        assert len(await ask(other, root, manifest_hash, ticket=ticket_for(other.id, manifest_hash))) == CHUNKS
        await trio.sleep(SERVINGS_FORGET_SECONDS)
        assert await ask(node, root, manifest_hash, ticket=ticket, stop=4) == [0, 1, 2, 3]


async def test_waiting_is_bounded(memory, clock):
    """A holder that has not got a chunk waits as long as it was asked to, then says so; nothing hangs on it."""
    manifest_hash = payload_hash(signed_manifest()[0])
    async with memory.peers(A, B) as (holder, asker):
        ticket = ticket_for(asker.id, manifest_hash)
        for wait in (0.0, 5.0):
            started = trio.current_time()
            with pytest.raises(Refused) as refused:
                await ask(asker, holder, manifest_hash, ticket=ticket, wait_seconds=wait)
            assert refused.value.code == "not-here"
            assert wait <= trio.current_time() - started < wait + 1


async def test_too_many_streams(memory, clock):
    """One peer cannot hold more than a few streams open."""
    manifest_hash = payload_hash(signed_manifest()[0])
    async with memory.peers(A, B) as (holder, asker):
        ticket = ticket_for(asker.id, manifest_hash)
        codes = []

        async def one():
            try:
                await ask(asker, holder, manifest_hash, ticket=ticket, wait_seconds=5.0)
            except Refused as refused:
                codes.append(refused.code)

        async with trio.open_nursery() as nursery:
            for _ in range(STREAMS_PER_PEER_MAX + 2):
                nursery.start_soon(one)
        assert sorted(codes) == ["busy"] * 2 + ["not-here"] * STREAMS_PER_PEER_MAX


async def all_that_comes(stream):
    """Until the stream is reset."""
    came = b""
    with suppress(Unreachable):
        while part := await stream.receive_some(1 << 20):
            came += part
    return came


@pytest.mark.parametrize("where", ["request", "acknowledgement"])
async def test_a_refusal_is_not_sent_back(memory, clock, where):
    """A refusal sent to a holder is a breach that is complained of, and never passes for the holder's own word."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    refusal = encode_frame(Refusal(code="echo", detail="said the asker")) + END
    async with memory.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        stream = await node.transport.open(root.address, "chunks")
        if where == "acknowledgement":
            request = ChunkRequest(
                run=RUN, manifest_hash=manifest_hash, ticket=ticket_for(node.id, manifest_hash), first=0, stop=1
            )
            await Channel(stream).send(request, end=True)
        await stream.send_all(refusal)
        assert b"echo" not in await all_that_comes(stream)
        assert root.complaints == [(node.id, UnexpectedMessage)]
        assert sum(traffic.acknowledged_bytes for traffic in root.broadcaster.traffic.values()) == 0


async def test_all_that_could_be_asked_for(memory, clock):
    """A request for every chunk there may be is served what is here."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with memory.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        with pytest.raises(Refused) as refused:
            await ask(node, root, manifest_hash, ticket=ticket_for(node.id, manifest_hash), stop=CHUNKS_MAX)
        assert refused.value.code == "not-here"
        assert root.broadcaster.traffic[node.id].sent_bytes == manifest.length_bytes


async def test_requests_outside(memory, clock):
    """A request that makes no sense costs its sender the stream, and the holder goes on serving others."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with memory.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        ticket = ticket_for(node.id, manifest_hash)
        with pytest.raises((Unreachable, ProtocolError)):
            await ask(node, root, manifest_hash, ticket=ticket, first=5, stop=5)
        assert root.complaints == [(node.id, SchemaViolation)]
        assert len(await ask(node, root, manifest_hash, ticket=ticket)) == CHUNKS
