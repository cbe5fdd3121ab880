"""What a request may hold of our memory and our time while it is being read, and who may send how much."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest
import trio
import trio.testing

from echo2.p2p.channel import (
    BODY_PIECE_BYTES,
    BODY_PIECE_SECONDS,
    REQUEST_SECONDS,
    STRANGER_BYTES_MAX,
    Channel,
    answering,
    request,
)
from echo2.p2p.codec import LENGTH, encode_frame
from echo2.p2p.errors import FrameTooLarge, Refused, Stalled, Unreachable
from echo2.p2p.identity import Identity
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import MIB, Ack, Chunk, Hello, PeerAddress
from echo2.p2p.unread import Unread

ASKER, ANSWERER = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
PEER = PeerAddress(peer=ANSWERER.peer_id, addresses=("/memory/answerer",))
LARGE = Chunk(index=0, data=bytes(MIB))


class Kept:
    """A stream in memory with what its reader said it keeps."""

    def __init__(self, stream):
        self._stream = stream
        self.peer = stream.peer
        self.kept = 0
        self.most = 0

    def keeps(self, count):
        self.kept = count
        self.most = max(self.most, count)

    def __getattr__(self, name):
        return getattr(self._stream, name)


class Host:
    """An answerer of chunks for `known` peers; `streams` are those it served, `complaints` what it said of whom."""

    def __init__(self, network, *, known=(), unread=None):
        self.network, self.known = network, known
        self.streams, self.complaints, self.answered = [], [], []
        self.hold = None
        self._handler = answering(
            Chunk, self._answer, lambda peer, error: self.complaints.append((peer, type(error))),
            allowed=self._allowed, unread=unread,
        )  # fmt: skip

    async def serve(self, stream):
        self.streams.append(Kept(stream))
        await self._handler(self.streams[-1])

    def _allowed(self, peer):
        return None if peer in self.known else Refused("hello_first", "who are you?", 0.0)

    async def _answer(self, peer, chunk):
        self.answered.append(len(chunk.data))
        if self.hold is not None:
            await self.hold.wait()
        return Ack(count=len(chunk.data) % 1000)


@pytest.fixture
async def network():
    return MemoryNetwork(random.Random(0), delay_seconds=0.05)


@pytest.fixture
async def asker(network):
    async with network.transport(ASKER) as transport:
        yield transport


@pytest.fixture
async def answerer(network):
    async with network.transport(ANSWERER) as transport:
        yield transport


async def test_a_stranger_may_send_only_little(autojump_clock, network, asker, answerer):
    """Its large frame is not read: it is told why, in the words of `allowed`, and did no wrong."""
    host = Host(network)
    answerer.set_handler("report", host.serve)
    with pytest.raises(Refused) as refused:
        await request(asker, PEER, "report", LARGE, Ack)
    assert refused.value.code == "hello_first"
    assert (host.answered, host.complaints, host.streams[0].most) == ([], [], LENGTH.size)


async def test_a_refusal_is_heard_though_the_request_could_not_be_sent(autojump_clock, network, asker, answerer):
    """The asker whose frame nobody reads gets the refusal, not a broken stream."""
    host = Host(network)
    answerer.set_handler("report", host.serve)
    with pytest.raises(Refused, match="who are you"):
        await request(asker, PEER, "report", Chunk(index=0, data=bytes(4 * MIB)), Ack)


async def test_a_stranger_is_answered_as_ever_when_it_sends_little(autojump_clock, network, asker, answerer):
    """What hello needs passes."""
    host = Host(network)
    answerer.set_handler("report", host.serve)
    assert await request(asker, PEER, "report", Chunk(index=0, data=bytes(60_001)), Ack) == Ack(count=1)


async def test_a_known_peer_may_send_what_the_message_allows(autojump_clock, network, asker, answerer):
    """The bound of its type stays, and is its fault to break."""
    host = Host(network, known={ASKER.peer_id})
    answerer.set_handler("report", host.serve)
    assert await request(asker, PEER, "report", LARGE, Ack) == Ack(count=MIB % 1000)
    stream = await asker.open(PEER, "report")
    await stream.send_all(LENGTH.pack(Chunk.BYTES_MAX + 1))
    with pytest.raises(Unreachable):
        await stream.receive_some(1)
    assert host.complaints == [(ASKER.peer_id, FrameTooLarge)]


async def test_a_request_is_kept_until_it_was_answered(autojump_clock, network, nursery, asker, answerer):
    """Half a frame, a whole frame without END, and a request being answered all count; then nothing does."""
    host = Host(network, known={ASKER.peer_id})
    host.hold = trio.Event()
    answerer.set_handler("report", host.serve)
    stream = await asker.open(PEER, "report")
    frame = encode_frame(LARGE)
    await stream.send_all(frame[: len(frame) // 2])
    await trio.sleep(1)
    (served,) = host.streams
    assert 0.9 * len(frame) / 2 < served.kept <= len(frame) / 2
    await stream.send_all(frame[len(frame) // 2 :])
    await trio.sleep(1)
    assert (served.kept, host.answered) == (len(frame), [])
    await stream.send_all(LENGTH.pack(0))
    await trio.sleep(1)
    assert (served.kept, host.answered) == (len(frame) + LENGTH.size, [MIB])
    host.hold.set()
    await trio.sleep(1)
    assert served.kept == 0


async def test_a_stream_that_breaks_keeps_nothing(autojump_clock, network, asker, answerer):
    """Half a frame is let go when its sender goes away."""
    host = Host(network, known={ASKER.peer_id})
    answerer.set_handler("report", host.serve)
    stream = await asker.open(PEER, "report")
    await stream.send_all(encode_frame(LARGE)[:-1])
    await trio.sleep(1)
    assert host.streams[0].kept
    await stream.reset()
    await trio.sleep(1)
    assert host.streams[0].kept == 0


async def test_frames_one_after_the_other_are_kept_one_at_a_time(autojump_clock, network, asker, answerer):
    """Decoded, a frame of a long answer is its reader's: it counts no more."""
    served = []

    async def send(stream):
        await Channel(stream).send(LARGE, LARGE, end=True)
        await stream.close_write()

    answerer.set_handler("report", send)
    served = Kept(await asker.open(PEER, "report"))
    channel = Channel(served)
    for _ in range(2):
        await channel.receive(Chunk)
        assert served.kept == 0
    await channel.receive_end()
    assert served.most == len(encode_frame(LARGE))


@pytest.mark.parametrize("known", [True, False])
async def test_a_request_that_stops_half_way_is_let_go(autojump_clock, network, asker, answerer, known):
    """Each piece has its time; whoever is known may have a poor line, of a stranger it is held against it."""
    host = Host(network, known={ASKER.peer_id} if known else ())
    answerer.set_handler("report", host.serve)
    stream = await asker.open(PEER, "report")
    await stream.send_all(LENGTH.pack(50_000) + bytes(40_000))
    start = trio.current_time()
    with pytest.raises(Unreachable):
        await stream.receive_some(1)
    assert trio.current_time() - start == pytest.approx(BODY_PIECE_SECONDS, abs=1)
    assert host.complaints == ([] if known else [(ASKER.peer_id, Stalled)])


async def test_streams_that_stall_together_are_held_against_a_stranger_once(autojump_clock, network, asker, answerer):
    """They are one dead line; when it stalls again, that is news."""
    host = Host(network, unread=Unread(8))
    answerer.set_handler("report", host.serve)
    for times in (1, 2):
        streams = [await asker.open(PEER, "report") for _ in range(4)]
        for stream in streams:
            await stream.send_all(LENGTH.pack(50_000))
        for stream in streams:
            with pytest.raises(Unreachable):
                await stream.receive_some(1)
        assert host.complaints == [(ASKER.peer_id, Stalled)] * times


async def test_a_slow_line_is_fast_enough(autojump_clock, network, asker, answerer):
    """A little above the least rate, a large request of a known peer is read to its end."""
    host = Host(network, known={ASKER.peer_id})
    answerer.set_handler("report", host.serve)
    stream = await asker.open(PEER, "report")
    rate = 1.2 * BODY_PIECE_BYTES / BODY_PIECE_SECONDS
    data = encode_frame(Chunk(index=0, data=bytes(int(1.5 * REQUEST_SECONDS * rate)))) + LENGTH.pack(0)
    for at in range(0, len(data), int(rate)):
        await stream.send_all(data[at : at + int(rate)])
        await trio.sleep(1)
    assert host.complaints == []
    assert len(host.answered) == 1


async def test_silent_strangers_make_room_for_each_other(autojump_clock, network, answerer):
    """However many say nothing, the oldest of the greediest goes, and a request that is sent is answered."""
    host = Host(network, unread=Unread(8))
    answerer.set_handler("report", host.serve)
    async with network.transport(ASKER) as asker, network.transport(Identity(b"\x03" * 32)) as flooder:
        silent = [await flooder.open(PEER, "report") for _ in range(20)]
        assert await request(asker, PEER, "report", Chunk(index=0, data=b"12"), Ack) == Ack(count=2)
        with pytest.raises(Unreachable):
            await silent[0].receive_some(1)
        assert host.complaints == []


def test_a_stranger_may_send_what_hello_needs():
    """Hello and the refusals it may get are no longer than what a stranger may send."""
    assert Hello.BYTES_MAX <= STRANGER_BYTES_MAX


async def test_the_greediest_peer_loses_its_oldest_place(autojump_clock):
    """By hand: with room for three, b's one place outlives a's two; among equals the oldest goes."""
    unread = Unread(3)
    with ExitStack() as stack:
        scopes = [stack.enter_context(unread.place(peer)) for peer in "baac"]
        assert [one.cancel_called for one in scopes] == [False, True, False, False]
        scopes.append(stack.enter_context(unread.place("d")))
        assert [one.cancel_called for one in scopes] == [True, True, False, False, False]
        assert unread.count == 3
    assert unread.count == 0
    assert unread.evicted == 2
