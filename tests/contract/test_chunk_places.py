"""The places for serving chunks are the ticket holders': what strangers hold open costs those nothing."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from contract.snapshot_pool import CHUNKS, ROOT, A, B, MemoryWorld, ask, put, signed_manifest, ticket_for

from echo2.p2p.channel import Channel
from echo2.p2p.chunk_server import (
    HANDSHAKE_SECONDS,
    SILENT_MAX,
    STRANGER_SECONDS,
    STREAMS_MAX,
    STREAMS_PER_PEER_MAX,
    UNREAD_MAX,
)
from echo2.p2p.errors import Stalled, Unreachable
from echo2.p2p.identity import Identity, payload_hash
from echo2.p2p.messages import Ack

STRANGERS = [Identity(bytes([200, number]) * 16) for number in range(17)]


@pytest.fixture
def memory(tmp_path):
    return MemoryWorld(tmp_path)


@pytest.fixture
def clock(memory):
    return memory.clock


async def silence(stranger, holder, count):
    return [await stranger.transport.open(holder.address, "chunks") for _ in range(count)]


async def test_strangers_that_say_nothing_hold_no_place(memory, clock, nursery):
    """Seventeen fresh keys hold four silent streams each, and a ticket holder is served at once."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with memory.peers(ROOT, A, *STRANGERS) as (root, node, *strangers):
        await put(root, signed, manifest)
        for stranger in strangers:
            await silence(stranger, root, STREAMS_PER_PEER_MAX)
        assert len(strangers) * STREAMS_PER_PEER_MAX > STREAMS_MAX
        assert root.broadcaster.streams_served == 0
        started = trio.current_time()
        assert len(await ask(node, root, manifest_hash, ticket=ticket_for(node.id, manifest_hash))) == CHUNKS
        assert trio.current_time() - started < 1
        assert root.broadcaster.turned_away == 0


async def test_more_silence_than_is_borne_pushes_out_silence(memory, clock, nursery):
    """With every place for reading taken, the oldest of the greediest goes; who asks in between is served."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with memory.peers(ROOT, A, B, *STRANGERS[:2]) as (root, node, other, *strangers):
        await put(root, signed, manifest)

        async def one(peer):
            assert len(await ask(peer, root, manifest_hash, ticket=ticket_for(peer.id, manifest_hash))) == CHUNKS

        async with trio.open_nursery() as flood:
            for stranger in strangers:
                for _ in range(UNREAD_MAX):
                    flood.start_soon(silence, stranger, root, 1)
            flood.start_soon(one, node)
            flood.start_soon(one, other)
        assert root.complaints == []


async def test_a_stranger_that_never_asks_is_complained_of(memory, clock, nursery):
    """Not for one request that did not come in time, but for some; its streams end after the time."""
    async with memory.peers(ROOT, STRANGERS[0]) as (root, stranger):
        for count in range(1, 2 * SILENT_MAX + 1):
            (stream,) = await silence(stranger, root, 1)
            started = trio.current_time()
            with pytest.raises(Unreachable):
                await stream.receive_some(1)
            assert trio.current_time() - started == pytest.approx(STRANGER_SECONDS, abs=0.5)
            assert root.complaints == [(stranger.id, Stalled)] * (count // SILENT_MAX)


async def test_a_ticket_holder_has_more_time_and_does_no_wrong(memory, clock, nursery):
    """Its line may be full of chunks that it passes on: a request that is late is let go, and no more."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with memory.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        await ask(node, root, manifest_hash, ticket=ticket_for(node.id, manifest_hash), stop=1)
        for _ in range(SILENT_MAX):
            (stream,) = await silence(node, root, 1)
            started = trio.current_time()
            with pytest.raises(Unreachable):
                await stream.receive_some(1)
            assert trio.current_time() - started == pytest.approx(HANDSHAKE_SECONDS, abs=0.5)
        assert root.complaints == []


async def test_turned_away_is_counted_and_said_seldom(memory, clock, nursery, caplog):
    """Who finds the places taken is told so; the log says how many there were, not each of them."""
    manifest_hash = payload_hash(signed_manifest()[0])
    async with memory.peers(A, B) as (holder, asker):
        ticket = ticket_for(asker.id, manifest_hash)

        async def one():
            with suppress(Exception):
                await ask(asker, holder, manifest_hash, ticket=ticket, wait_seconds=5.0)

        async with trio.open_nursery() as asks:
            for _ in range(STREAMS_PER_PEER_MAX + 5):
                asks.start_soon(one)
        assert holder.broadcaster.turned_away == 5
        assert len([one for one in caplog.records if "turned away busy" in one.getMessage()]) == 1


async def test_what_is_no_request_is_a_breach_as_ever(memory, clock, nursery):
    """A frame that is not a request is complained of at once."""
    async with memory.peers(ROOT, STRANGERS[0]) as (root, stranger):
        (stream,) = await silence(stranger, root, 1)
        await Channel(stream).send(Ack(count=1), end=True)
        with pytest.raises(Unreachable):
            await stream.receive_some(1)
        assert [peer for peer, _ in root.complaints] == [stranger.id]
