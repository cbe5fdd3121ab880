"""Bytes to records and back."""

from __future__ import annotations

import math
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.codec import (
    END,
    LENGTH,
    check_length,
    decode_frame,
    decode_record,
    encode_frame,
    encode_record,
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from echo2.p2p.errors import FrameTooLarge, MalformedFrame, ProtocolError, SchemaViolation, UnexpectedMessage
from echo2.p2p.messages import (
    CHUNK_BYTES_MAX,
    KIB,
    SLICES_MAX,
    Ack,
    Chunk,
    Message,
    PeerAddress,
    Refusal,
    Signed,
    SliceAck,
    SubmitReply,
    Ticket,
)

PEER = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


def test_frame_by_hand():
    """An Ack of 3 is the bytes worked out by hand from the msgpack specification."""
    by_hand = bytes.fromhex("82 a474797065 a361636b a4626f6479 81 a5636f756e74 03")
    assert encode_frame(Ack(count=3)) == bytes.fromhex("00000017") + by_hand
    assert decode_frame(by_hand, Ack) == Ack(count=3)


def test_the_longest_reply_to_a_submission_fits_its_frame():
    """As many acknowledgements as slices, each with a reason of full length in four-byte characters."""
    ack = SliceAck(lease_id=bytes(16), state="rejected", reason="\U0001f600" * 512)
    reply = SubmitReply(acks=(ack,) * SLICES_MAX)
    assert decode_frame(encode_frame(reply)[4:], SubmitReply) == reply


@given(st.integers(0, 2**53))
def test_count_round_trips(count):
    """Every legal count survives encoding and decoding."""
    assert decode_frame(encode_frame(Ack(count=count))[4:], Ack) == Ack(count=count)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_message_or_a_protocol_error(body):
    """Decoding never raises anything but a ProtocolError, whatever comes."""
    try:
        message = decode_frame(body, Ack, Chunk)
    except ProtocolError:
        return
    assert isinstance(message, Message)


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@given(st.sampled_from(["ack", "chunk", "refusal", "no-such"]), VALUES)
def test_any_msgpack_body_is_a_message_or_a_protocol_error(name, value):
    """Well-formed msgpack of any shape is taken by the schema or refused by it, and nothing else."""
    with suppress(ProtocolError):
        decode_frame(msgpack.packb({"type": name, "body": value}), Ack, Chunk)


def test_refusal_is_always_allowed():
    """A Refusal decodes wherever another message was expected."""
    refusal = Refusal(code="later", detail="busy", retry_seconds=2.5)
    assert decode_frame(encode_frame(refusal)[4:], Ack) == refusal


def test_length_is_bounded_by_the_largest_expected_type():
    """A length is checked against what is expected, before any byte of it is read."""
    check_length(64 * KIB, [Ack])
    check_length(Chunk.BYTES_MAX, [Ack, Chunk])
    with pytest.raises(FrameTooLarge):
        check_length(64 * KIB + 1, [Ack])
    with pytest.raises(FrameTooLarge):
        check_length(Chunk.BYTES_MAX + 1, [Ack, Chunk])


def test_message_above_its_own_bound_is_refused_even_where_a_larger_one_is_expected():
    """An Ack may not use the room that a Chunk has."""
    body = msgpack.packb({"type": "ack", "body": {"count": 0, "padding": bytes(65 * KIB)}})
    with pytest.raises(FrameTooLarge):
        decode_frame(body, Ack, Chunk)


def test_largest_chunk_fits_its_frame():
    """The bound of a Chunk leaves room for the largest chunk and its envelope."""
    chunk = Chunk(index=2**53, data=bytes(CHUNK_BYTES_MAX))
    assert decode_frame(encode_frame(chunk)[4:], Chunk) == chunk


def test_our_own_oversized_message_is_our_error():
    """Encoding a message above its bound fails here, not at the peer."""

    class Small(Message):
        TYPE = "small"
        BYTES_MAX = 8
        data: bytes

    with pytest.raises(FrameTooLarge):
        encode_frame(Small(data=bytes(9)))


def test_end_is_a_frame_of_no_bytes():
    """END is a length of zero, which no message can have."""
    assert (LENGTH.pack(0), len(END)) == (END, 4)
    with pytest.raises(ProtocolError):
        decode_frame(b"", Ack)


def test_record_keeps_the_order_of_its_fields():
    """The canonical bytes are the fields in the declared order, each under its name."""
    ticket = Ticket(run="r", manifest_hash=bytes(32), peer=PEER)
    assert list(msgpack.unpackb(encode_record(ticket))) == ["run", "manifest_hash", "peer"]
    assert decode_record(encode_record(ticket), Ticket) == ticket


def test_tuples_travel_as_arrays():
    """A tuple field comes back as a tuple."""
    address = PeerAddress(peer=PEER, addresses=("/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/2"))
    assert decode_record(encode_record(address), PeerAddress) == address


@pytest.mark.parametrize(
    ("data", "error"),
    [(b"", MalformedFrame), (b"\xc1", MalformedFrame), (b"\x80", SchemaViolation), (b"\x01", MalformedFrame)],
)
def test_record_that_is_not_one(data, error):
    """Bytes that are no record raise the error of the first check they fail."""
    with pytest.raises(error):
        decode_record(data, Signed)


def test_unexpected_type_is_named_short():
    """The error quotes at most a few characters of what the peer sent."""
    with pytest.raises(UnexpectedMessage) as caught:
        decode_frame(msgpack.packb({"type": "x" * 10_000, "body": {}}), Ack)
    assert len(str(caught.value)) < 200


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_tokens_round_trip(tokens):
    """Token ids survive as int32, four bytes each, least byte first."""
    data = pack_tokens(tokens)
    assert len(data) == 4 * len(tokens)
    assert unpack_tokens(data).tolist() == tokens


def test_tokens_by_hand():
    """1 and -2 as little-endian int32."""
    assert pack_tokens([1, -2]) == bytes.fromhex("01000000 feffffff")


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_logprobs_round_trip(values):
    """Finite float32 values survive exactly."""
    assert unpack_logprobs(pack_logprobs(values)).tolist() == [float(np.float32(value)) for value in values]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logprob_that_is_not_finite_is_a_schema_violation(value):
    """NaN and infinities are refused where they are unpacked."""
    with pytest.raises(SchemaViolation):
        unpack_logprobs(pack_logprobs([0.0, value]))


@pytest.mark.parametrize("unpack", [unpack_tokens, unpack_logprobs])
def test_ragged_array_is_a_schema_violation(unpack):
    """Bytes that are not a multiple of four are no array."""
    with pytest.raises(SchemaViolation):
        unpack(b"\0\0\0\0\0")
