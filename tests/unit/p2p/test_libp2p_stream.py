"""How a yamux stream hands out what came, and takes what is to be sent, under a virtual clock."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing
from unit.p2p.test_libp2p_yamux import Bench

from echo2.p2p.errors import Unreachable
from echo2.p2p.guards import Buffers
from echo2.p2p.libp2p_stream import ACK, DATA, FIN, HEADER, PING, RST, SYN, WINDOW_BYTES, WINDOW_UPDATE


@pytest.fixture
async def bench(nursery):
    bench = Bench(nursery)
    yield bench
    bench.yamux.kill("the test is over")


@pytest.fixture
async def stream(autojump_clock, bench):
    bench.peer.send(WINDOW_UPDATE, SYN, 1)
    await trio.testing.wait_all_tasks_blocked()
    await bench.peer.read_all()
    return bench.accepted[0]


async def test_parts_are_waited_for_until_all_are_here(nursery, bench, stream):
    """The reader is woken once, with the pieces in order, and what is above its count stays."""
    got = []

    async def read():
        got.append(await stream.receive_parts(30_000))

    nursery.start_soon(read)
    for letter in (b"a", b"b"):
        bench.peer.send(DATA, 0, 1, payload=letter * 10_000)
        await trio.testing.wait_all_tasks_blocked()
        assert got == []
    bench.peer.send(DATA, 0, 1, payload=b"c" * 10_001)
    await trio.testing.wait_all_tasks_blocked()
    assert b"".join(got[0]) == b"a" * 10_000 + b"b" * 10_000 + b"c" * 10_000
    assert await stream.receive_some(100) == b"c"


async def test_more_than_the_window_is_had_piece_by_piece(nursery, bench, stream):
    """A reader that wants more than the window holds makes room in time: the sender is never left waiting."""
    wanted = 3 * WINDOW_BYTES
    got = []

    async def read():
        while sum(map(len, got)) < wanted:
            got.extend(await stream.receive_parts(wanted - sum(map(len, got))))

    nursery.start_soon(read)
    room, sent = WINDOW_BYTES, 0
    while sent < wanted:
        count = min(room, 50_000, wanted - sent)
        assert count, "no room was given"
        bench.peer.send(DATA, 0, 1, payload=bytes(count))
        sent, room = sent + count, room - count
        await trio.testing.wait_all_tasks_blocked()
        room += sum(frame[3] for frame in await bench.peer.read_all() if frame[0] == WINDOW_UPDATE)
    assert sum(map(len, got)) == wanted


async def test_parts_before_the_end_come_and_then_none(bench, stream):
    """FIN ends the wait: what came is returned, then []."""
    bench.peer.send(DATA, FIN, 1, payload=b"last")
    assert b"".join(await stream.receive_parts(1000)) == b"last"
    assert await stream.receive_parts(1000) == []


async def test_parts_before_a_reset_come_and_then_unreachable(bench, stream):
    """What had come is not lost by the reset."""
    bench.peer.send(DATA, 0, 1, payload=b"last")
    bench.peer.send(WINDOW_UPDATE, RST, 1)
    assert b"".join(await stream.receive_parts(1000)) == b"last"
    with pytest.raises(Unreachable):
        await stream.receive_parts(1000)


async def test_a_short_read_after_a_long_one_was_given_up(bench, stream):
    """Who gives up waiting for much gets the little that is there when it asks for that."""
    with trio.move_on_after(1):
        await stream.receive_parts(30_000)
    bench.peer.send(DATA, 0, 1, payload=b"little")
    assert await stream.receive_some(30_000) == b"little"


async def test_small_frames_in_parts_take_little_memory(nursery, bench, stream):
    """Thousands of one-byte frames reach the reader as a few pieces."""
    got = []

    async def read():
        got.append(await stream.receive_parts(10_000))

    nursery.start_soon(read)
    for _ in range(10_000):
        bench.peer.send(DATA, 0, 1, payload=b"x")
    await trio.testing.wait_all_tasks_blocked()
    assert len(got[0]) <= 4
    assert b"".join(got[0]) == b"x" * 10_000


async def test_a_small_piece_does_not_keep_a_large_message(bench, stream):
    """A few bytes out of a message full of something else are copied out of it."""
    pongs = HEADER.pack(0, PING, ACK, 0, 0) * 5000
    bench.wire.give.send_nowait(HEADER.pack(0, DATA, 0, 1, 5000) + b"y" * 5000 + pongs)
    (piece,) = await stream.receive_parts(5000)
    assert isinstance(piece, bytes)


async def test_several_buffers_are_sent_as_one(bench, stream):
    """They go out in order, in one frame while they fit in one, and empty ones are nothing."""
    await stream.send_all(b"one", b"", b"two", bytes(1000))
    assert await _data(bench) == [(DATA, 0, 1, 1006, b"onetwo" + bytes(1000))]


async def test_nothing_to_send_is_sent_at_once(bench, stream):
    """No buffer, or an empty one, sends no frame."""
    await stream.send_all()
    await stream.send_all(b"")
    assert await _data(bench) == []


async def _data(bench):
    return [frame for frame in await bench.peer.read_all() if frame[0] == DATA]


async def test_kept_bytes_are_charged_and_let_go(nursery, autojump_clock):
    """By hand: 60,000 kept, let go, kept again, then 60,000 more of another stream: the connection ends."""
    buffers = Buffers(each_max=100_000, total_max=10**9)
    bench = Bench(nursery, buffers=buffers)
    for stream_id in (1, 3):
        bench.peer.send(WINDOW_UPDATE, SYN, stream_id)
    await trio.testing.wait_all_tasks_blocked()
    one, other = bench.accepted
    bench.peer.send(DATA, 0, 1, payload=bytes(60_000))
    assert len(b"".join(await one.receive_parts(60_000))) == 60_000
    assert buffers.total == 0
    one.keeps(60_000)
    assert buffers.total == 60_000
    one.keeps(0)
    assert buffers.total == 0
    one.keeps(60_000)
    bench.peer.send(DATA, 0, 3, payload=bytes(30_000))
    await other.receive_parts(30_000)
    other.keeps(30_000)
    assert (buffers.total, bench.yamux.closed) == (90_000, None)
    other.keeps(60_000)
    assert bench.yamux.closed is not None
    assert buffers.total == 0
    one.keeps(70_000)
    one.keeps(0)
    assert buffers.total == 0


async def test_an_abandoned_stream_keeps_nothing(nursery, autojump_clock):
    """Whatever its handler forgot to let go."""
    buffers = Buffers(each_max=100_000, total_max=10**9)
    bench = Bench(nursery, buffers=buffers)
    bench.peer.send(WINDOW_UPDATE, SYN, 1)
    await trio.testing.wait_all_tasks_blocked()
    bench.accepted[0].keeps(60_000)
    bench.accepted[0].abandon()
    assert buffers.total == 0
    bench.yamux.kill("the test is over")


def held_streams(bench, count):
    for n in range(count):
        bench.peer.send(WINDOW_UPDATE, SYN, 2 * n + 1)


async def test_what_the_peer_does_not_take_is_charged(nursery, autojump_clock):
    """By hand: a window is taken, the rest is charged until it is taken too, or given up."""
    unsent = Buffers(each_max=10**9, total_max=10**9)
    bench = Bench(nursery, writes=100, unsent=unsent)
    held_streams(bench, 1)
    await trio.testing.wait_all_tasks_blocked()
    (stream,) = bench.accepted
    scope = trio.CancelScope()

    async def send():
        with scope:
            await stream.send_all(bytes(WINDOW_BYTES), bytes(60_000))

    nursery.start_soon(send)
    await trio.testing.wait_all_tasks_blocked()
    assert unsent.total == 60_000
    bench.peer.send(WINDOW_UPDATE, 0, 1, 50_000)
    await trio.testing.wait_all_tasks_blocked()
    assert unsent.total == 10_000
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert unsent.total == 0
    bench.yamux.kill("the test is over")


async def test_replies_that_nobody_takes_end_their_connection(nursery, autojump_clock):
    """By hand: more than 100,000 bytes are kept beside the windows. Every sender is told, and none hangs."""
    unsent = Buffers(each_max=100_000, total_max=10**9)
    bench = Bench(nursery, writes=100, unsent=unsent)
    held_streams(bench, 3)
    await trio.testing.wait_all_tasks_blocked()
    told = []

    async def send(stream):
        try:
            await stream.send_all(bytes(90_000))
            await stream.send_all(bytes(WINDOW_BYTES - 50_000))
        except Unreachable as error:
            told.append(str(error))

    for stream in bench.accepted:
        nursery.start_soon(send, stream)
    await trio.testing.wait_all_tasks_blocked()
    assert bench.yamux.closed is not None
    assert "wait to be sent" in bench.yamux.closed
    assert (len(told), unsent.total) == (3, 0)


async def test_a_peer_that_takes_nothing_goes_before_a_slow_one(nursery, autojump_clock):
    """Beyond what the process holds, not the one with most ends when that one still takes what it is sent."""
    unsent = Buffers(each_max=10**9, total_max=400_000, first=lambda one: one.takes_nothing)
    slow, stuck, fresh = (Bench(nursery, writes=100, unsent=unsent) for _ in range(3))
    for bench in (slow, stuck, fresh):
        held_streams(bench, 1)
    await trio.testing.wait_all_tasks_blocked()

    async def send(bench, count):
        with contextlib.suppress(Unreachable):
            await bench.accepted[0].send_all(bytes(WINDOW_BYTES + count))

    for bench, count in ((slow, 70_000), (stuck, 60_000)):
        nursery.start_soon(send, bench, count)
        await trio.testing.wait_all_tasks_blocked()
    for _ in range(4):
        await trio.sleep(5)
        slow.peer.send(WINDOW_UPDATE, 0, 1, 500)
        stuck.peer.send(WINDOW_UPDATE, 0, 1, 0)
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(send, fresh, 20_000)
    await trio.testing.wait_all_tasks_blocked()
    assert (slow.yamux.closed, fresh.yamux.closed) == (None, None)
    assert "wait to be sent" in stuck.yamux.closed
    for bench in (slow, fresh):
        bench.yamux.kill("the test is over")
