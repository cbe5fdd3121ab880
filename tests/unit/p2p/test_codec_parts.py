"""A chunk's frame in pieces is the same frame, and is read no otherwise than the whole."""

from __future__ import annotations

import itertools

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.codec import LENGTH, SPLIT_BYTES, decode_frame, decode_parts, encode_frame, frame_parts
from echo2.p2p.errors import ProtocolError
from echo2.p2p.messages import CHUNK_BYTES_MAX, Ack, Chunk

INDICES = st.one_of(st.integers(0, 300), st.sampled_from([127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**53]))
LENGTHS = st.sampled_from([1, SPLIT_BYTES - 1, SPLIT_BYTES, 65535, 65536, 200_000])


def cut(body, places):
    """`body` in pieces."""
    ends = sorted({place % len(body) for place in places} | {0, len(body)})
    return [body[start:stop] for start, stop in itertools.pairwise(ends)]


def outcome(decode):
    """What it returns, or the class of what it raises."""
    try:
        return decode()
    except ProtocolError as error:
        return type(error)


@given(INDICES, LENGTHS)
def test_the_pieces_are_the_frame(index, length):
    """Put together they are byte for byte what one piece would be."""
    chunk = Chunk(index=index, data=bytes(length))
    assert b"".join(frame_parts(chunk)) == encode_frame(chunk)


def test_a_chunks_data_are_not_copied():
    """The very bytes of the message are what is sent."""
    chunk = Chunk(index=7, data=bytes(SPLIT_BYTES))
    assert frame_parts(chunk)[-1] is chunk.data
    assert len(frame_parts(Ack())) == 1
    assert len(frame_parts(Chunk(index=7, data=b"few"))) == 1


@given(INDICES, LENGTHS, st.lists(st.integers(0, 300_000), max_size=5))
def test_any_pieces_are_the_chunk(index, length, places):
    """However a chunk's frame is cut, it is read as when it is whole."""
    chunk = Chunk(index=index, data=bytes(length))
    assert decode_parts(cut(encode_frame(chunk)[LENGTH.size :], places), Chunk) == chunk


@given(st.integers(0, 60), st.integers(0, 255), st.lists(st.integers(0, 9000), max_size=2))
def test_a_changed_byte_is_read_as_in_the_whole(place, value, places):
    """Whatever byte of the head a peer changes, the outcome is the same as that of the plain decoder."""
    body = bytearray(encode_frame(Chunk(index=300, data=bytes(8192)))[LENGTH.size :])
    body[place] = value
    parts = cut(bytes(body), places)
    assert outcome(lambda: decode_parts(parts, Chunk, Ack)) == outcome(lambda: decode_frame(bytes(body), Chunk, Ack))


@pytest.mark.parametrize(
    "body",
    [
        {"type": "chunk", "body": {"data": bytes(8192), "index": 1}},
        {"body": {"index": 1, "data": bytes(8192)}, "type": "chunk"},
        {"type": "chunk", "body": {"index": 1.0, "data": bytes(8192)}},
        {"type": "chunk", "body": {"index": -1, "data": bytes(8192)}},
        {"type": "chunk", "body": {"index": 2**53 + 1, "data": bytes(8192)}},
        {"type": "chunk", "body": {"index": 1, "data": "x" * 8192}},
        {"type": "chunk", "body": {"index": 1, "data": bytes(CHUNK_BYTES_MAX + 1)}},
        {"type": "chunk", "body": {"index": 1, "data": bytes(8192), "more": 1}},
        {"type": "refusal", "body": {"code": "x", "detail": "y" * 8192}},
    ],
)
def test_another_frame_is_read_as_in_the_whole(body):
    """Another order, type or bound has the outcome that it has in one piece."""
    packed = msgpack.packb(body)
    expected = outcome(lambda: decode_frame(packed, Chunk))
    assert outcome(lambda: decode_parts([packed], Chunk)) == expected
    assert outcome(lambda: decode_parts([packed[:5000], packed[5000:]], Chunk)) == expected


def test_a_chunk_where_none_is_expected():
    """It is as unexpected in pieces as whole."""
    body = encode_frame(Chunk(index=1, data=bytes(8192)))[LENGTH.size :]
    assert outcome(lambda: decode_parts([body], Ack)) is outcome(lambda: decode_frame(body, Ack))
