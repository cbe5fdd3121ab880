"""The bytes of circuit relay v2 and DCUtR: as py-libp2p writes them, and what a hostile peer's are taken for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.relay.circuit_v2.pb import circuit_pb2, dcutr_pb2
from unit.p2p.relay_places import PEERS

from echo2.p2p.errors import (
    FrameTooLarge,
    MalformedFrame,
    ProtocolError,
    SchemaViolation,
    Truncated,
)
from echo2.p2p.relay_wire import (
    ADDRESSES_MAX,
    MESSAGE_BYTES_MAX,
    HolePunch,
    HopMessage,
    HopType,
    Limit,
    PunchType,
    Reservation,
    Status,
    StopMessage,
    StopType,
    decode,
    encode,
    read_message,
)

peers = st.sampled_from(PEERS)
numbers = st.integers(0, 2**32 - 1)
addresses = st.lists(st.binary(min_size=1, max_size=40), max_size=4).map(tuple)
limits = st.none() | st.builds(Limit, numbers, numbers)
statuses = st.none() | st.sampled_from(Status)
reservations = st.none() | st.builds(Reservation, numbers, addresses)
hops = st.builds(HopMessage, st.sampled_from(HopType), st.none() | peers, reservations, limits, statuses)
stops = st.builds(StopMessage, st.sampled_from(StopType), st.none() | peers, limits, statuses)
punches = st.builds(HolePunch, st.sampled_from(PunchType), addresses)


def body_of(message):
    """Without the length: one or two bytes of varint."""
    data = encode(message)
    return data[1:] if data[0] < 0x80 else data[2:]


@given(hops | stops | punches)
def test_messages_come_back_as_they_were(message):
    """What is written is read again the same."""
    assert decode(body_of(message), type(message)) == message


@given(hops)
def test_stock_reads_our_hop_messages_and_we_its(message):
    """py-libp2p's generated code and ours agree on every field, both ways."""
    theirs = circuit_pb2.HopMessage.FromString(body_of(message))
    assert theirs.type == message.type
    assert (theirs.status if theirs.HasField("status") else None) == message.status
    assert theirs.HasField("peer") == (message.peer is not None)
    if message.reservation is not None:
        assert theirs.reservation.expire == message.reservation.expires_unix_seconds
        assert tuple(theirs.reservation.addrs) == message.reservation.addresses
    if message.limit is not None:
        assert (theirs.limit.duration, theirs.limit.data) == (message.limit.duration_seconds, message.limit.data_bytes)
    theirs.senderRecord = b"a field that we do not know"
    assert decode(theirs.SerializeToString(), HopMessage) == message


@given(stops)
def test_stock_reads_our_stop_messages_and_we_its(message):
    """The same of what goes to the reserved peer."""
    theirs = circuit_pb2.StopMessage.FromString(body_of(message))
    assert (theirs.type, theirs.status if theirs.HasField("status") else None) == (message.type, message.status)
    assert decode(theirs.SerializeToString(), StopMessage) == message


@given(punches)
def test_stock_reads_our_hole_punching_messages_and_we_its(message):
    """The same of DCUtR."""
    theirs = dcutr_pb2.HolePunch.FromString(body_of(message))
    assert (theirs.type, tuple(theirs.ObsAddrs)) == (message.type, message.addresses)
    assert decode(theirs.SerializeToString(), HolePunch) == message


@given(st.binary(max_size=200), st.sampled_from([HopMessage, StopMessage, HolePunch]))
def test_any_bytes_are_a_message_or_a_protocol_error(data, kind):
    """Nothing else is raised, whatever comes."""
    try:
        message = decode(data, kind)
    except ProtocolError:
        return
    assert decode(body_of(message), kind) == message or kind is HopMessage


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("08", MalformedFrame),  # a number cut short
        ("0a 05 00", MalformedFrame),  # a field longer than its message
        ("0b", MalformedFrame),  # a group, which protobuf has given up
        ("00 01", MalformedFrame),  # field 0
        ("08 ff ff ff ff ff ff ff ff ff ff 01", MalformedFrame),  # a number that does not end
        ("08 ff ff ff ff ff ff ff ff ff 7f", MalformedFrame),  # above 64 bits
        ("08 07", SchemaViolation),  # no such type
        ("0a 00", SchemaViolation),  # the type as bytes
        ("08 01 12 00", SchemaViolation),  # a peer without a peer id
        ("08 01 10 05", SchemaViolation),  # a peer as a number
    ],
)
def test_each_kind_of_malformed_message_has_its_error(data, error):
    """The class says what is wrong."""
    with pytest.raises(error):
        decode(bytes.fromhex(data), HopMessage)


def test_golden_bytes():
    """RESERVE, and an OK with 60 s and 1024 bytes."""
    assert encode(HopMessage(HopType.RESERVE)) == bytes.fromhex("02 08 00")
    answer = HopMessage(HopType.STATUS, limit=Limit(60, 1024), status=Status.OK)
    assert encode(answer) == bytes.fromhex("0b 08 02 22 05 08 3c 10 80 08 28 64")


def test_a_status_nobody_defined_is_a_refusal():
    """A newer relay's reason is not taken for OK."""
    assert decode(bytes.fromhex("08 02 28 e7 07"), HopMessage).status is Status.MALFORMED_MESSAGE


def test_only_so_many_addresses_are_kept():
    """A peer that lists more is heard, the rest is not."""
    theirs = dcutr_pb2.HolePunch(type=100, ObsAddrs=[b"x"] * 50 + [b"y" * 1000])
    assert decode(theirs.SerializeToString(), HolePunch).addresses == (b"x",) * ADDRESSES_MAX


class Bytes:
    """A stream that holds these bytes."""

    peer = "someone"

    def __init__(self, data):
        self.data = data

    async def receive_some(self, max_bytes):
        part, self.data = self.data[:max_bytes], self.data[max_bytes:]
        return part


async def test_reading_takes_one_message_and_leaves_the_rest():
    """What follows a message on the stream belongs to the relayed connection."""
    stream = Bytes(encode(HopMessage(HopType.STATUS, status=Status.OK)) + b"noise")
    assert (await read_message(stream, HopMessage)).status is Status.OK
    assert stream.data == b"noise"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff\xff\xff\xff\x0f", FrameTooLarge),
        (bytes([0x81, 0x20]) + bytes(MESSAGE_BYTES_MAX + 1), FrameTooLarge),
        (b"\x80" * 20, MalformedFrame),
        (b"\x05\x08", Truncated),
        (b"", Truncated),
    ],
)
async def test_a_length_is_checked_before_anything_is_read_for_it(data, error):
    """Too long, endless and cut off each have their error."""
    with pytest.raises(error):
        await read_message(Bytes(data), HopMessage)
