"""The muxer against a peer that is played by hand, frame by frame, under a virtual clock."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing

from echo2.p2p import libp2p_yamux
from echo2.p2p.errors import Unreachable
from echo2.p2p.frame_budget import SMALL_FRAME_BYTES, SMALL_FRAMES_BURST
from echo2.p2p.guards import NUISANCE_BURST, Buffers
from echo2.p2p.libp2p_stream import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    PING,
    RST,
    SYN,
    WINDOW_BYTES,
    WINDOW_BYTES_MAX,
    WINDOW_UPDATE,
)
from echo2.p2p.libp2p_yamux import BATCH_BYTES, FRAME_BYTES, SILENT_SECONDS_MAX, STREAMS_MAX, WRITE_SECONDS_MAX, Yamux
from echo2.p2p.rates import Limiter


class Wire:
    """The secured connection and the socket of a Yamux, in memory; `written` and `give` are the peer's side."""

    def __init__(self, writes):
        self.give, self._incoming = trio.open_memory_channel(1_000_000)
        self._outgoing, self.written = trio.open_memory_channel(writes)

    async def read(self, n=None):
        return await self._incoming.receive()

    async def write(self, data):
        await self._outgoing.send(data)

    async def send_eof(self):
        self._outgoing.close()

    async def close(self):
        self._outgoing.close()
        self._incoming.close()


class Peer:
    """The other end, played by the test."""

    def __init__(self, wire):
        self.wire = wire
        self.frames = []
        self._buffer = b""

    def send(self, kind, flags, stream_id, length=0, payload=b"", version=0):
        self.wire.give.send_nowait(HEADER.pack(version, kind, flags, stream_id, length or len(payload)) + payload)

    async def read_all(self):
        """Take everything written, until nothing more comes."""
        with trio.move_on_after(0.01):
            async for data in self.wire.written:
                self._buffer += data
        return self._whole()

    def read_now(self):
        """Take what is written already."""
        with contextlib.suppress(trio.WouldBlock):
            while True:
                self._buffer += self.wire.written.receive_nowait()
        return self._whole()

    def _whole(self):
        while len(self._buffer) >= HEADER.size:
            _, kind, flags, stream_id, length = HEADER.unpack_from(self._buffer)
            end = HEADER.size + (length if kind == DATA else 0)
            if kind != PING or flags != SYN:  # our own pings are of no interest
                self.frames.append((kind, flags, stream_id, length, self._buffer[HEADER.size : end]))
            self._buffer = self._buffer[end:]
        frames, self.frames = self.frames, []
        return frames


class Bench:
    """A Yamux in a nursery with its peer; every inbound stream is kept in `accepted`."""

    def __init__(self, nursery, *, initiator=False, writes=1, **shared):
        self.accepted = []
        self.wire = Wire(writes)
        self.peer = Peer(self.wire)
        self.answer = True
        self.yamux = Yamux(self.wire, self.wire, "PEER", initiator=initiator, accept=self._accept, **shared)
        nursery.start_soon(self.yamux.run)

    def _accept(self, stream):
        self.accepted.append(stream)
        return self.answer


@pytest.fixture
async def bench(nursery):
    bench = Bench(nursery)
    yield bench
    bench.yamux.kill("the test is over")


async def test_stream_of_ours_by_hand(autojump_clock, nursery):
    """Opening, sending and closing write SYN, DATA and FIN, byte for byte as the specification has them."""
    bench = Bench(nursery, initiator=True)
    stream = bench.yamux.open_stream()
    await stream.send_all(b"hi")
    await stream.close_write()
    with trio.move_on_after(0.01):
        text = b""
        async for data in bench.wire.written:
            text += data
    assert text.startswith(bytes.fromhex("00 01 0001 00000001 00000000"))  # window update, SYN, stream 1
    assert bytes.fromhex("00 00 0000 00000001 00000002") + b"hi" in text  # data, stream 1
    assert text.endswith(bytes.fromhex("00 01 0004 00000001 00000000"))  # window update, FIN
    bench.yamux.kill("the test is over")


async def test_stream_of_the_peer(autojump_clock, bench):
    """An inbound stream is acknowledged, read to its end, answered and closed."""
    bench.peer.send(WINDOW_UPDATE, SYN, 1)
    bench.peer.send(DATA, FIN, 1, payload=b"question")
    assert await bench.peer.read_all() == [(WINDOW_UPDATE, ACK, 1, 0, b"")]
    (stream,) = bench.accepted
    assert await stream.receive_some(4) == b"ques"
    assert await stream.receive_some(100) == b"tion"
    assert await stream.receive_some(100) == b""
    await stream.send_all(b"answer")
    await stream.close_write()
    assert await bench.peer.read_all() == [(DATA, 0, 1, 6, b"answer"), (WINDOW_UPDATE, FIN, 1, 0, b"")]
    assert bench.yamux.stream_count == 0


async def test_frames_may_be_cut_anywhere(autojump_clock, bench):
    """Frames arrive whole although the bytes come one by one."""
    for byte in HEADER.pack(0, DATA, SYN, 1, 5) + b"bytes":
        bench.wire.give.send_nowait(bytes([byte]))
    await trio.testing.wait_all_tasks_blocked()
    assert await bench.accepted[0].receive_some(100) == b"bytes"


@pytest.mark.parametrize(
    "frames",
    [
        [(DATA, 0, 1, 0, b"", 1)],
        [(4, 0, 1)],
        [(WINDOW_UPDATE, SYN, 2)],
        [(WINDOW_UPDATE, SYN, 0)],
        [(WINDOW_UPDATE, SYN, 3), (WINDOW_UPDATE, SYN, 1)],
        [(WINDOW_UPDATE, SYN, 1), (WINDOW_UPDATE, SYN, 1)],
        [(WINDOW_UPDATE, SYN, 1), (DATA, 0, 1, WINDOW_BYTES_MAX + 1)],
        [(WINDOW_UPDATE, SYN, 1), *[(DATA, 0, 1, 0, bytes(WINDOW_BYTES // 2))] * 2, (DATA, 0, 1, 0, b"x")],
        [(WINDOW_UPDATE, SYN, 1), (DATA, 0, 1, WINDOW_BYTES + 1)],
        [(WINDOW_UPDATE, SYN, 1), (DATA, FIN, 1, 0, b"end"), (DATA, 0, 1, 0, b"x")],
        [(WINDOW_UPDATE, SYN, 1), (WINDOW_UPDATE, 0, 1, libp2p_yamux.SEND_WINDOW_MAX)],
        [(WINDOW_UPDATE, SYN, 1), *[(DATA, 0, 1)] * (NUISANCE_BURST + 1)],
        [(WINDOW_UPDATE, RST, 1)] * (NUISANCE_BURST + 1),
        [(DATA, 0, 99, 0, b"x")] * (NUISANCE_BURST + 1),
        [(DATA, 0, 99, 0, bytes(SMALL_FRAME_BYTES))] * (NUISANCE_BURST + 1),
        [(WINDOW_UPDATE, 0, 99, 1)] * (NUISANCE_BURST + 1),
        [(WINDOW_UPDATE, ACK, 99)] * (NUISANCE_BURST + 1),
        [(WINDOW_UPDATE, SYN, 1), *[(DATA, ACK, 1)] * (NUISANCE_BURST + 1)],
        [(WINDOW_UPDATE, SYN, 1), *[(WINDOW_UPDATE, FIN, 1)] * (NUISANCE_BURST + 1)],
        [(GO_AWAY, 0, 0)] * (NUISANCE_BURST + 2),
        [(PING, ACK, 0, 7)] * (NUISANCE_BURST + 1),
        [(WINDOW_UPDATE, SYN, 1), *[(WINDOW_UPDATE, 0, 1, 1)] * (SMALL_FRAMES_BURST + 100)],
        [(WINDOW_UPDATE, SYN, 1), *[(DATA, 0, 1, 0, b"x")] * (SMALL_FRAMES_BURST + 100)],
    ],
    ids=[
        "version",
        "type",
        "our-id",
        "id-0",
        "backwards",
        "twice",
        "huge-frame",
        "ignores-window",
        "announces-too-much",
        "goes-on-after-the-end",
        "window-without-end",
        "empty-frames-without-end",
        "resets-without-end",
        "bytes-for-nobody",
        "blocks-for-nobody",
        "windows-for-nobody",
        "acknowledges-nothing",
        "acknowledges-nothing-by-data",
        "ends-without-end",
        "good-byes-without-end",
        "answers-to-no-ping",
        "small-windows-without-end",
        "single-bytes-without-end",
    ],
)
async def test_peer_that_breaks_yamux_loses_the_connection(autojump_clock, bench, frames):
    """Each way of breaking the protocol ends the connection, and only that."""
    for frame in frames:
        bench.peer.send(*frame)
    await trio.testing.wait_all_tasks_blocked()
    await bench.peer.read_all()
    assert bench.yamux.closed.startswith("the peer broke yamux")
    assert bench.yamux.fault is not None
    with pytest.raises(Unreachable):
        bench.yamux.open_stream()


async def test_what_was_on_its_way_to_a_stream_we_closed_is_no_nuisance(autojump_clock, bench):
    """Ever so many streams, each reset here while the peer still sends: nothing of it counts against the peer."""
    for n in range(NUISANCE_BURST // 100):
        bench.peer.send(WINDOW_UPDATE, SYN, 2 * n + 1)
        await bench.peer.read_all()
        await bench.accepted[-1].reset()
        for _ in range(libp2p_yamux.PARTING_FRAMES):
            bench.peer.send(DATA, 0, 2 * n + 1, payload=bytes(SMALL_FRAME_BYTES))
        await bench.peer.read_all()
    assert bench.yamux.closed is None


async def test_small_frames_are_paid_for_by_the_bytes_they_serve(autojump_clock, bench):
    """Among large frames a peer may send small ones without end."""
    bench.peer.send(WINDOW_UPDATE, SYN, 1)
    await trio.testing.wait_all_tasks_blocked()
    (stream,) = bench.accepted
    for _ in range(3 * SMALL_FRAMES_BURST // 8):
        for _ in range(8):
            bench.peer.send(DATA, 0, 1, payload=b"x")
        bench.peer.send(DATA, 0, 1, payload=bytes(60_000))
        await trio.testing.wait_all_tasks_blocked()
        await stream.receive_some(8)
        while stream._received:
            await stream.receive_some(65_536)
        bench.peer.read_now()
    assert bench.yamux.closed is None


async def test_a_flood_in_one_message_leaves_room_for_other_tasks(autojump_clock, bench):
    """Between the frames of one message, and between small messages, others get their turns."""
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        bench.wire.give.send_nowait(HEADER.pack(0, WINDOW_UPDATE, 0, 99, 1) * 5000)
        while bench.yamux.heard_bytes == 0:
            await trio.lowlevel.checkpoint()
        begun = turns
        bench.wire.give.send_nowait(HEADER.pack(0, PING, SYN, 0, 1))
        while (PING, ACK, 0, 1, b"") not in bench.peer.read_now():
            await trio.lowlevel.checkpoint()
        assert turns - begun >= 5000 // libp2p_yamux.SLICE_FRAMES
        nursery.cancel_scope.cancel()


async def test_what_the_peer_may_send_unread_is_its_window(autojump_clock, bench):
    """A full window is held without complaint, and credit comes back as it is read, half a window at a time."""
    bench.peer.send(DATA, SYN, 1, payload=bytes(WINDOW_BYTES))
    await bench.peer.read_all()
    (stream,) = bench.accepted
    read = 0
    while read < WINDOW_BYTES // 2:
        read += len(await stream.receive_some(WINDOW_BYTES // 4))
    ((kind, flags, stream_id, grant, _),) = await bench.peer.read_all()
    assert (kind, flags, stream_id) == (WINDOW_UPDATE, 0, 1)
    assert grant == read
    assert bench.yamux.closed is None


async def test_streams_beyond_the_cap_are_reset(autojump_clock, bench):
    """The peer keeps the streams it may have; one more is reset and costs nothing else."""
    for n in range(STREAMS_MAX + 1):
        bench.peer.send(WINDOW_UPDATE, SYN, 2 * n + 1)
    frames = await bench.peer.read_all()
    assert frames.count((WINDOW_UPDATE, RST, 2 * STREAMS_MAX + 1, 0, b"")) == 1
    assert (len(bench.accepted), len(frames)) == (STREAMS_MAX, STREAMS_MAX + 1)
    assert bench.yamux.closed is None


async def test_refused_stream_is_reset_and_what_follows_ignored(autojump_clock, bench):
    """A stream not accepted is reset; its data, already on the way, are dropped."""
    bench.answer = False
    bench.peer.send(WINDOW_UPDATE, SYN, 1)
    bench.peer.send(DATA, FIN, 1, payload=b"late")
    assert await bench.peer.read_all() == [(WINDOW_UPDATE, RST, 1, 0, b"")]
    assert bench.yamux.closed is None


async def test_ping_is_echoed(autojump_clock, bench):
    """A ping comes back with its value."""
    bench.peer.send(PING, SYN, 0, 0xC0FFEE)
    assert await bench.peer.read_all() == [(PING, ACK, 0, 0xC0FFEE, b"")]


async def test_peer_that_makes_us_answer_and_does_not_read_is_cut_off(autojump_clock, bench):
    """Pings without reading the answers end the connection when the queue is full, not our memory."""
    for n in range(libp2p_yamux.CONTROL_FRAMES_MAX + 10):
        bench.peer.send(PING, SYN, 0, n)
    await trio.testing.wait_all_tasks_blocked()
    assert "does not read" in bench.yamux.closed


@pytest.mark.parametrize("drop", [False, True])
async def test_what_a_banned_peer_sent_is_not_read_any_more(autojump_clock, bench, drop):
    """Of any other connection that ends, what came before is read to the end."""
    bench.peer.send(WINDOW_UPDATE, SYN, 1)
    bench.peer.send(DATA, 0, 1, payload=b"already here")
    await trio.testing.wait_all_tasks_blocked()
    [stream] = bench.accepted
    bench.yamux.kill("it is banned", drop=drop)
    if drop:
        with pytest.raises(Unreachable, match="it is banned"):
            await stream.receive_some(100)
    else:
        assert await stream.receive_some(100) == b"already here"


async def test_dead_link_is_noticed(autojump_clock, bench):
    """A peer that says nothing at all is given up within the bound, and whoever waits is told."""
    stream = bench.yamux.open_stream()
    start = trio.current_time()
    with pytest.raises(Unreachable, match="nothing heard"):
        await stream.receive_some(1)
    assert SILENT_SECONDS_MAX - 1 < trio.current_time() - start < SILENT_SECONDS_MAX + 11


async def test_peer_that_talks_but_never_reads_is_given_up(autojump_clock, bench, nursery):
    """A write the kernel does not take ends the connection after its bound, though the peer is heard."""

    async def talk():
        while bench.yamux.closed is None:
            bench.peer.send(PING, SYN, 0, 1)
            await trio.sleep(5)

    nursery.start_soon(talk)
    stream = bench.yamux.open_stream()
    start = trio.current_time()
    with pytest.raises(Unreachable, match="has read nothing"):
        await stream.receive_some(1)
    assert trio.current_time() - start < WRITE_SECONDS_MAX + 25


async def test_closed_window_holds_one_stream_and_not_its_sibling(autojump_clock, bench, nursery):
    """A sender out of window waits as long as it takes; another stream sends meanwhile; credit sets it going again."""
    held, other = bench.yamux.open_stream(), bench.yamux.open_stream()
    sent = trio.Event()

    async def send():
        await held.send_all(bytes(WINDOW_BYTES + 10))
        sent.set()

    nursery.start_soon(send)
    first = sum(length for kind, _, _, length, _ in await bench.peer.read_all() if kind == DATA)
    bench.peer.send(PING, SYN, 0, 1)  # a sign of life
    await trio.sleep(20)
    assert (first, sent.is_set()) == (WINDOW_BYTES, False)
    nursery.start_soon(other.send_all, b"meanwhile")
    assert (DATA, 0, other.stream_id, 9, b"meanwhile") in await bench.peer.read_all()
    bench.peer.send(WINDOW_UPDATE, 0, held.stream_id, 100)
    assert (DATA, 0, held.stream_id, 10, bytes(10)) in await bench.peer.read_all()
    assert sent.is_set()


async def test_cancelled_sender_tears_no_frame(autojump_clock, bench, nursery):
    """After a send was cancelled half way, the frames on the wire are whole and the connection goes on."""
    stream = bench.yamux.open_stream()
    with trio.move_on_after(1):
        await stream.send_all(bytes(3 * WINDOW_BYTES))
    await stream.reset()
    other = bench.yamux.open_stream()
    nursery.start_soon(other.send_all, b"whole")
    frames = await bench.peer.read_all()
    assert all(length <= FRAME_BYTES for kind, _, _, length, _ in frames if kind == DATA)
    assert (WINDOW_UPDATE, RST, stream.stream_id, 0, b"") in frames
    assert frames[-1] == (DATA, 0, other.stream_id, 5, b"whole")


async def test_bulk_streams_take_turns(autojump_clock, bench, nursery):
    """Two streams with much to send alternate, frame by frame."""
    streams = [bench.yamux.open_stream() for _ in range(2)]
    for stream in streams:
        nursery.start_soon(stream.send_all, bytes(3 * FRAME_BYTES))
    frames = [stream_id for kind, _, stream_id, _, _ in await bench.peer.read_all() if kind == DATA]
    turns = {tuple(frames[n : n + 2]) for n in range(len(frames) - 1)}
    assert len(frames) == 6
    assert {(2, 4), (4, 2)} <= turns  # the first may have one frame more before the other asks


async def test_finished_stream_is_forgotten_when_the_peer_never_ends_it(autojump_clock, bench, nursery):
    """A stream we closed, whose peer says nothing more, does not stay for ever."""

    async def talk():
        while True:
            bench.peer.send(PING, SYN, 0, 1)
            await trio.sleep(5)
            await bench.peer.read_all()

    stream = bench.yamux.open_stream()
    await stream.close_write()
    nursery.start_soon(talk)
    await trio.sleep(libp2p_yamux.LINGER_SECONDS + 60)
    assert (bench.yamux.stream_count, bench.yamux.closed) == (0, None)
    nursery.cancel_scope.cancel()


async def test_reset_keeps_what_had_arrived(autojump_clock, bench):
    """Bytes that came before a reset can be read; then the stream is Unreachable."""
    bench.peer.send(DATA, SYN, 1, payload=b"before")
    bench.peer.send(WINDOW_UPDATE, RST, 1)
    await trio.testing.wait_all_tasks_blocked()
    (stream,) = bench.accepted
    assert await stream.receive_some(100) == b"before"
    with pytest.raises(Unreachable, match="the peer reset it"):
        await stream.receive_some(100)


async def test_close_flushes_and_says_good_bye(autojump_clock, nursery):
    """What was sent before `close` is written, then a GO_AWAY, and a peer that never hangs up is not waited for."""
    bench = Bench(nursery, writes=10)
    stream = bench.yamux.open_stream()
    await stream.send_all(b"last words")
    nursery.start_soon(bench.yamux.close)
    frames = await bench.peer.read_all()
    assert (DATA, 0, stream.stream_id, 10, b"last words") in frames
    assert any(frame[0] == GO_AWAY for frame in frames)
    await trio.sleep(3)
    assert bench.yamux.closed is not None


async def test_nothing_new_after_the_peer_said_good_bye(autojump_clock, bench):
    """After GO_AWAY old streams go on and no new one is opened."""
    old = bench.yamux.open_stream()
    bench.peer.send(GO_AWAY, 0, 0)
    bench.peer.send(DATA, 0, old.stream_id, payload=b"still")
    await bench.peer.read_all()
    assert await old.receive_some(100) == b"still"
    with pytest.raises(Unreachable):
        bench.yamux.open_stream()


async def test_bytes_come_as_they_arrive_and_the_end_after_the_last(autojump_clock, bench):
    """A frame cut into pieces is read piece by piece; its FIN counts when the last one has come."""
    frame = HEADER.pack(0, DATA, SYN | FIN, 1, 6) + b"abcdef"
    for part in (frame[:5], frame[5:14], frame[14:]):
        bench.wire.give.send_nowait(part)
        await trio.testing.wait_all_tasks_blocked()
    (stream,) = bench.accepted
    assert [await stream.receive_some(2) for _ in range(4)] == [b"ab", b"cd", b"ef", b""]


async def test_one_byte_frames_take_little_memory(autojump_clock, bench):
    """Thousands of tiny frames are kept as a few pieces."""
    bench.peer.send(WINDOW_UPDATE, SYN, 1)
    for _ in range(10_000):
        bench.peer.send(DATA, 0, 1, payload=b"x")
    await trio.testing.wait_all_tasks_blocked()
    (stream,) = bench.accepted
    assert len(stream._received) <= 4
    got = b""
    while len(got) < 10_000:
        got += await stream.receive_some(3000)
    assert got == b"x" * 10_000


async def test_unread_bytes_are_counted_and_given_back(autojump_clock, nursery):
    """What is read, reset or left by the end of the connection is no longer counted."""
    buffers = Buffers(each_max=WINDOW_BYTES, total_max=WINDOW_BYTES)
    bench = Bench(nursery, buffers=buffers)
    for stream_id in (1, 3, 5):
        bench.peer.send(DATA, SYN, stream_id, payload=bytes(1000))
    await trio.testing.wait_all_tasks_blocked()
    assert buffers.total == 3000
    await bench.accepted[0].receive_some(400)
    assert buffers.total == 2600
    await bench.accepted[1].reset()
    assert buffers.total == 1600
    bench.yamux.kill("the test is over")
    assert buffers.total == 0


async def test_who_holds_most_goes_when_the_process_is_full(autojump_clock, nursery):
    """Two connections share the process's room; the heavier one ends, the other goes on."""
    buffers = Buffers(each_max=WINDOW_BYTES, total_max=150_000)
    heavy, light = (Bench(nursery, buffers=buffers) for _ in range(2))
    heavy.peer.send(DATA, SYN, 1, payload=bytes(100_000))
    await trio.testing.wait_all_tasks_blocked()
    light.peer.send(DATA, SYN, 1, payload=bytes(60_000))
    await trio.testing.wait_all_tasks_blocked()
    assert "wait to be read" in heavy.yamux.closed
    assert (light.yamux.closed, buffers.total) == (None, 60_000)
    light.yamux.kill("the test is over")


async def test_capped_upload_is_shared_by_streams_and_never_holds_control_frames(autojump_clock, nursery):
    """Under a cap two streams get the same, the cap is kept, and a ping is answered at once."""
    upload = Limiter(800_000)
    bench = Bench(nursery, writes=1000, upload=upload)
    nursery.start_soon(upload.run)
    streams = [bench.yamux.open_stream() for _ in range(2)]
    for stream in streams:
        nursery.start_soon(stream.send_all, bytes(WINDOW_BYTES))
    await trio.sleep(1)
    await bench.peer.read_all()
    bench.peer.send(PING, SYN, 0, 7)
    assert (PING, ACK, 0, 7, b"") in await bench.peer.read_all()
    start = trio.current_time()
    sent = {stream.stream_id: 0 for stream in streams}
    while trio.current_time() < start + 2:
        for kind, _, stream_id, length, _ in await bench.peer.read_all():
            if kind == DATA:
                sent[stream_id] += length
        await trio.sleep(0.1)
    assert sum(sent.values()) == pytest.approx(200_000, rel=0.1)
    assert max(sent.values()) - min(sent.values()) <= BATCH_BYTES / 10
    nursery.cancel_scope.cancel()
    bench.yamux.kill("the test is over")
