"""The faults that the in-memory network makes to order, under a virtual clock."""

from __future__ import annotations

import random

import pytest
import trio

from echo2.p2p.errors import ConfigurationError, Unreachable
from echo2.p2p.identity import Identity
from echo2.p2p.memory import DIAL_SECONDS, PIECE_BYTES, SILENT_SECONDS, MemoryNetwork
from echo2.p2p.messages import PeerAddress

ALICE, BOB = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
TO_BOB = PeerAddress(peer=BOB.peer_id, addresses=("/memory/bob",))


async def echo(stream):
    while data := await stream.receive_some(1 << 20):
        await stream.send_all(data)
    await stream.close_write()


async def count(stream):
    total = 0
    while data := await stream.receive_some(1 << 20):
        total += len(data)
    await stream.send_all(total.to_bytes(8, "big"))
    await stream.close_write()


async def test_delay_by_hand(autojump_clock):
    """Opening costs one round trip, an echo another."""
    network = MemoryNetwork(random.Random(0), delay_seconds=0.25)
    async with network.transport(ALICE) as alice, network.transport(BOB) as bob:
        bob.set_handler("hello", echo)
        start = trio.current_time()
        stream = await alice.open(TO_BOB, "hello")
        assert trio.current_time() - start == pytest.approx(0.5)
        await stream.send_all(b"x")
        assert await stream.receive_some(1) == b"x"
        assert trio.current_time() - start == pytest.approx(1.0)


async def test_rate_by_hand(autojump_clock):
    """A sender's uplink is shared by its streams: two megabytes at one megabyte a second take two seconds."""
    network = MemoryNetwork(random.Random(0), bytes_per_second=1e6)
    async with network.transport(ALICE) as alice, network.transport(BOB) as bob:
        bob.set_handler("report", count)
        start = trio.current_time()

        async def send():
            stream = await alice.open(TO_BOB, "report")
            await stream.send_all(bytes(1_000_000))
            await stream.close_write()
            assert await stream.receive_some(8) == (1_000_000).to_bytes(8, "big")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            nursery.start_soon(send)
        assert trio.current_time() - start == pytest.approx(2.0, abs=0.001)


async def test_kill_stops_handlers_and_breaks_streams(autojump_clock):
    """A crashed peer's handler is cancelled, its streams break at the other end, and it refuses until it comes back."""
    network = MemoryNetwork(random.Random(0), delay_seconds=0.1)
    ended = []

    async def hold(stream):
        try:
            await trio.sleep_forever()
        finally:
            ended.append(stream.peer)

    async with network.transport(ALICE) as alice, network.transport(BOB) as bob:
        bob.set_handler("hello", hold)
        stream = await alice.open(TO_BOB, "hello")
        network.kill(BOB.peer_id)
        with pytest.raises(Unreachable, match="crashed"):
            await stream.receive_some(1)
        assert ended == [ALICE.peer_id]
        with pytest.raises(Unreachable, match="refused"):
            await alice.open(TO_BOB, "hello")
        with pytest.raises(Unreachable):
            await bob.open(PeerAddress(peer=ALICE.peer_id, addresses=("/memory/alice",)), "hello")
        async with network.transport(BOB) as again:
            again.set_handler("hello", echo)
            await alice.open(TO_BOB, "hello")


async def test_partition_is_silent_until_it_is_noticed(autojump_clock):
    """Streams across a partition break after a while, dialling times out, and a healed link takes new streams."""
    network = MemoryNetwork(random.Random(0), delay_seconds=0.1)
    async with network.transport(ALICE) as alice, network.transport(BOB) as bob:
        bob.set_handler("hello", echo)
        stream = await alice.open(TO_BOB, "hello")
        network.partition(ALICE.peer_id, BOB.peer_id)
        start = trio.current_time()
        await stream.send_all(b"into the void")
        with pytest.raises(Unreachable, match="silent"):
            await stream.receive_some(1)
        assert trio.current_time() - start == pytest.approx(SILENT_SECONDS)
        start = trio.current_time()
        with pytest.raises(Unreachable):
            await alice.open(TO_BOB, "hello")
        assert trio.current_time() - start == pytest.approx(DIAL_SECONDS)
        network.heal(ALICE.peer_id, BOB.peer_id)
        await alice.open(TO_BOB, "hello")


async def _pieces_until_loss(seed):
    network = MemoryNetwork(random.Random(seed), loss=0.05)
    async with network.transport(ALICE) as alice, network.transport(BOB) as bob:
        received = []

        async def note(stream):
            while data := await stream.receive_some(PIECE_BYTES):
                received.append(len(data))

        bob.set_handler("report", note)
        for _ in range(10):
            try:
                stream = await alice.open(TO_BOB, "report")
                for _ in range(1000):
                    await stream.send_all(bytes(100))
            except Unreachable:
                received.append(-1)
                continue
            with pytest.raises(Unreachable):
                await stream.receive_some(1)
            received.append(-1)
    return received


async def test_lost_piece_breaks_its_stream_and_the_seed_decides(autojump_clock):
    """After a loss nothing later arrives and both ends find out; the same seed loses the same pieces."""
    first = await _pieces_until_loss(7)
    assert first.count(-1) == 10
    assert 0 < sum(1 for size in first if size > 0) < 10_000
    assert await _pieces_until_loss(7) == first
    assert await _pieces_until_loss(8) != first


async def test_one_key_is_one_process(autojump_clock):
    """A second transport of a key that is on the network is refused."""
    network = MemoryNetwork(random.Random(0))
    async with network.transport(ALICE):
        with pytest.raises(ConfigurationError, match="already"):
            async with network.transport(ALICE):
                pass


async def test_finished_streams_are_not_kept(autojump_clock):
    """A long run of requests leaves no stream behind."""
    network = MemoryNetwork(random.Random(0))
    async with network.transport(ALICE) as alice, network.transport(BOB) as bob:
        bob.set_handler("report", count)
        for _ in range(20):
            stream = await alice.open(TO_BOB, "report")
            await stream.close_write()
            await stream.receive_some(8)
        await trio.sleep(1)
        assert not alice._ends
        assert not bob._ends
        assert not bob._serving
