"""Frames over a stream, and the request-reply pattern, on the in-memory transport under a virtual clock."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter

import pytest
import trio

from echo2.p2p.channel import REQUEST_SECONDS, Channel, answering, hold_against, request
from echo2.p2p.codec import END, encode_frame
from echo2.p2p.errors import (
    FrameTooLarge,
    MalformedFrame,
    Refused,
    SchemaViolation,
    Truncated,
    UnexpectedMessage,
    Unreachable,
)
from echo2.p2p.identity import Identity
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import Ack, Chunk, Hello, PeerAddress, Refusal
from echo2.p2p.turns import TOGETHER_MAX, Turns

ASKER, ANSWERER = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
PEER = PeerAddress(peer=ANSWERER.peer_id, addresses=("/memory/answerer",))


class Pieces:
    """A stream that yields the given pieces, then the end, and keeps what is sent."""

    peer = ANSWERER.peer_id

    def __init__(self, *pieces):
        self.pieces = list(pieces)
        self.sent = []

    async def receive_some(self, max_bytes):
        if not self.pieces:
            return b""
        part = self.pieces[0][:max_bytes]
        self.pieces[0] = self.pieces[0][max_bytes:]
        if not self.pieces[0]:
            self.pieces.pop(0)
        return part

    async def receive_parts(self, max_bytes):
        part = await self.receive_some(max_bytes)
        return [part] if part else []

    def keeps(self, count):
        pass

    async def send_all(self, *data):
        self.sent.append(b"".join(data))


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


async def test_frames_are_put_together_from_any_pieces():
    """Frames arrive whole, however the stream cuts them."""
    data = encode_frame(Ack(count=1)) + encode_frame(Ack(count=2)) + END
    for size in (1, 3, len(data)):
        channel = Channel(Pieces(*(data[i : i + size] for i in range(0, len(data), size))))
        assert await channel.receive(Ack) == Ack(count=1)
        assert await channel.receive_or_end(Ack) == Ack(count=2)
        assert await channel.receive_or_end(Ack) is None


async def test_several_messages_and_end_are_one_write():
    """A request leaves in one piece, so it costs one packet."""
    stream = Pieces()
    await Channel(stream).send(Ack(count=1), Ack(count=2), end=True)
    assert stream.sent == [encode_frame(Ack(count=1)) + encode_frame(Ack(count=2)) + END]


async def test_a_chunk_is_sent_without_a_copy():
    """The bytes of the message themselves are handed to the stream, behind the frame's head."""
    handed = []

    class Kept(Pieces):
        async def send_all(self, *data):
            handed.extend(data)

    chunk = Chunk(index=3, data=bytes(100_000))
    await Channel(Kept()).send(chunk, end=True)
    assert any(part is chunk.data for part in handed)
    assert b"".join(handed) == encode_frame(chunk) + END


async def test_stream_that_ends_anywhere_before_end_is_truncated():
    """Every proper prefix of a conversation is Truncated, never a shorter conversation."""
    data = encode_frame(Ack(count=1)) + END
    for length in range(len(data)):
        channel = Channel(Pieces(data[:length]) if length else Pieces())
        with pytest.raises(Truncated):
            await _whole(channel)


async def _whole(channel):
    await channel.receive(Ack)
    await channel.receive_end()


async def test_refusal_is_raised_at_the_asker():
    """A Refusal where something else was expected is raised with its code and time to wait."""
    channel = Channel(Pieces(encode_frame(Refusal(code="busy", detail="come later", retry_seconds=3.0))))
    with pytest.raises(Refused) as caught:
        await channel.receive(Ack)
    assert (caught.value.code, caught.value.retry_seconds) == ("busy", 3.0)


async def test_message_after_the_last_is_unexpected():
    """More frames where END is due break the protocol."""
    channel = Channel(Pieces(encode_frame(Ack()) + encode_frame(Ack())))
    await channel.receive(Ack)
    with pytest.raises(UnexpectedMessage):
        await channel.receive_end()


async def test_request_is_answered(autojump_clock, asker, answerer):
    """The answer sees who asked, and its reply reaches the asker, three round trips at most later."""

    async def answer(peer, message):
        assert (peer, message) == (ASKER.peer_id, Ack(count=1))
        return Ack(count=2)

    answerer.set_handler("report", answering(Ack, answer, lambda peer, error: None))
    start = trio.current_time()
    assert await request(asker, PEER, "report", Ack(count=1), Ack) == Ack(count=2)
    assert trio.current_time() - start <= 3 * 0.1


async def test_refused_request_raises_at_the_asker(autojump_clock, asker, answerer):
    """What the answer raises as Refused arrives as Refused."""

    async def answer(peer, message):
        raise Refused("no-lease", "x" * 1000, 1.0)

    answerer.set_handler("report", answering(Ack, answer, lambda peer, error: None))
    with pytest.raises(Refused) as caught:
        await request(asker, PEER, "report", Ack(), Ack)
    assert (caught.value.code, caught.value.retry_seconds) == ("no-lease", 1.0)


async def test_answer_that_fails_is_unreachable_for_the_asker(autojump_clock, asker, answerer):
    """A mistake in the answer costs the asker a retry, not a wrong reply, and the answerer lives on."""
    calls = []

    async def answer(peer, message):
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        return Ack()

    answerer.set_handler("report", answering(Ack, answer, lambda peer, error: None))
    with pytest.raises(Unreachable):
        await request(asker, PEER, "report", Ack(), Ack)
    assert await request(asker, PEER, "report", Ack(), Ack) == Ack()


async def test_held_answer_is_waited_for_as_announced(autojump_clock, asker, answerer):
    """A reply kept back within wait_seconds arrives; beyond, the asker gives up at its bound."""

    async def answer(peer, message):
        await trio.sleep(message.count)
        return Ack()

    answerer.set_handler("report", answering(Ack, answer, lambda peer, error: None, wait_seconds=1000))
    assert await request(asker, PEER, "report", Ack(count=50), Ack, wait_seconds=60) == Ack()
    start = trio.current_time()
    with pytest.raises(Unreachable, match="did not answer"):
        await request(asker, PEER, "report", Ack(count=500), Ack, wait_seconds=60)
    assert trio.current_time() - start == pytest.approx(60 + REQUEST_SECONDS, abs=1)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff\xff\xff\xff", FrameTooLarge),
        (b"\0\0\0\1\xc1", MalformedFrame),
        (encode_frame(Ack(count=1))[:-3], Truncated),
        (encode_frame(Chunk(index=0, data=b"x")) + END, UnexpectedMessage),
        (encode_frame(Ack(count=1)).replace(b"\x01", b"\xff") + END, SchemaViolation),
        (END, UnexpectedMessage),
        (encode_frame(Refusal(code="no", detail="said the asker")) + END, UnexpectedMessage),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_peer_that_breaks_the_protocol_is_counted_once_and_cut_off(autojump_clock, asker, answerer, data, error):
    """Each way of breaking it is one complaint about that peer; the answer is not called and the host lives on."""
    complaints = []

    async def answer(peer, message):
        return Ack()

    answerer.set_handler("report", answering(Ack, answer, lambda peer, broken: complaints.append((peer, broken))))
    stream = await asker.open(PEER, "report")
    await stream.send_all(data)
    await stream.close_write()
    with pytest.raises(Unreachable):
        await stream.receive_some(1)
    ((peer, broken),) = complaints
    assert peer == ASKER.peer_id
    assert type(broken) is error
    assert await request(asker, PEER, "report", Ack(), Ack) == Ack()


async def test_reply_of_a_wrong_type_is_the_peers_fault(autojump_clock, asker, answerer):
    """A reply that is not what was asked for is a ProtocolError, not something to try again."""

    async def answer(peer, message):
        return Hello(wire_versions=(1,), software="s", role="node", name="n")

    answerer.set_handler("report", answering(Ack, answer, lambda peer, error: None))
    with pytest.raises(UnexpectedMessage):
        await request(asker, PEER, "report", Ack(), Ack)


async def test_asker_who_says_nothing_is_let_go(autojump_clock, asker, answerer):
    """A stream on which no request comes is dropped after a bound."""
    answerer.set_handler("report", answering(Ack, None, lambda peer, error: None))
    stream = await asker.open(PEER, "report")
    start = trio.current_time()
    with pytest.raises(Unreachable):
        await stream.receive_some(1)
    assert trio.current_time() - start == pytest.approx(2 * REQUEST_SECONDS, abs=1)


async def test_a_breach_is_held_against_its_peer_and_a_cut_stream_is_not(asker):
    """A process that is killed again and again breaks no protocol."""
    hold_against(asker, PEER.peer, Truncated("cut"))
    assert asker.offences == {}
    hold_against(asker, PEER.peer, SchemaViolation("odd"))
    assert asker.offences == {PEER.peer: 1}


async def test_a_peers_requests_are_answered_a_few_at_a_time(autojump_clock, network, asker, answerer):
    """20 at once: 8 are being answered, the others wait and are answered too; another peer does not wait for them."""
    going_on, most, others = Counter(), Counter(), []
    let_go = trio.Event()

    async def answer(peer, message):
        going_on[peer] += 1
        most[peer] = max(most[peer], going_on[peer])
        if peer == ASKER.peer_id:
            await let_go.wait()
        going_on[peer] -= 1
        return message

    answerer.set_handler("hello", answering(Ack, answer, lambda peer, error: None))
    answers = []

    async def ask(transport, count, into):
        into.append((await request(transport, PEER, "hello", Ack(count=count), Ack)).count)

    async with network.transport(Identity(b"\x03" * 32)) as another, trio.open_nursery() as nursery:
        for count in range(20):
            nursery.start_soon(ask, asker, count, answers)
        await trio.sleep(1)
        assert going_on[ASKER.peer_id] == TOGETHER_MAX
        await ask(another, 99, others)
        let_go.set()
    assert (sorted(answers), others, most[ASKER.peer_id]) == (list(range(20)), [99], TOGETHER_MAX)


async def test_a_reply_does_not_live_until_it_has_left():
    """While it waits for the asker's line there is its frame and nothing else of it, nor of the request."""
    alive = []

    class Slow(Pieces):
        async def send_all(self, *data):
            gc.collect()
            alive.append([kept() is not None for kept in made])
            await super().send_all(*data)

        async def close_write(self):
            pass

    made = []

    async def answer(_peer, message):
        reply = Chunk(index=message.count, data=bytes(1000))
        made.extend((weakref.ref(message), weakref.ref(reply)))
        return reply

    stream = Slow(encode_frame(Ack(count=7)) + END)
    await answering(Ack, answer, lambda peer, error: None)(stream)
    assert alive == [[False, False]]
    assert b"".join(stream.sent) == encode_frame(Chunk(index=7, data=bytes(1000))) + END


async def test_peers_without_a_turn_are_not_remembered(autojump_clock):
    """Not one that was cancelled while it waited, either."""
    turns = Turns(1)
    async with trio.open_nursery() as nursery:

        async def take():
            async with turns.turn("peer"):
                await trio.sleep(10)

        for _ in range(3):
            nursery.start_soon(take)
        await trio.sleep(1)
        assert len(turns) == 1
        nursery.cancel_scope.cancel()
    assert len(turns) == 0
