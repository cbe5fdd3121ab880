"""The messages of circuit relay v2 and of DCUtR, bytes to records and back. Pure but for `read_message`.

https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md and DCUtR.md: protobuf, each message after its length as
a varint. The schemas are small and frozen, so they are written out here: py-libp2p keeps its own behind a
package whose import brings in the whole stock host.

    HopMessage   type 1, peer 2, reservation 3, limit 4, status 5      to and from the relay
    StopMessage  type 1, peer 2, limit 3, status 4                     relay to the reserved peer
    Peer         id 1, addrs 2 ...       Reservation  expire 1, addrs 2 ..., voucher 3       Limit  duration 1, data 2
    HolePunch    type 1, ObsAddrs 2 ...                                between the two ends of a relayed connection

Unknown fields are skipped, as protobuf demands; everything that is known is checked and bounded. Vouchers are passed on
by nobody and checked by nobody in this version of the protocol: they are neither made nor kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

import base58

from .errors import FrameTooLarge, MalformedFrame, SchemaViolation, Truncated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .transport import Stream

HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"
PUNCH_PROTOCOL: Final = "/libp2p/dcutr"

MESSAGE_BYTES_MAX: Final = 4096
"""The specification's bound for DCUtR. Hop and stop messages carry a peer id and a few addresses: as much will do."""

ADDRESSES_MAX: Final = 16
"""Addresses of one message; as many as `messages.PeerAddress` holds."""

ADDRESS_BYTES_MAX: Final = 256
PEER_ID_BYTES_MAX: Final = 64
"""An Ed25519 peer id has 38; other kinds of key, of foreign peers, have hashes of 34."""

_VARINT_BYTES_MAX = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class HopType(IntEnum):
    """What a hop message is."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopType(IntEnum):
    """What a stop message is."""

    CONNECT = 0
    STATUS = 1


class PunchType(IntEnum):
    """What a DCUtR message is."""

    CONNECT = 100
    SYNC = 300


class Status(IntEnum):
    """A relay's answer. Any number a peer sends that is not here counts as MALFORMED_MESSAGE."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True, slots=True)
class Limit:
    """What one relayed connection may last and carry, both ways together. 0: no limit."""

    duration_seconds: int = 0
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A place at a relay until `expires_unix_seconds` (the relay's clock), and where the relay can be dialled."""

    expires_unix_seconds: int
    addresses: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class HopMessage:
    """Between a client and the relay."""

    type: HopType
    peer: str | None = None
    reservation: Reservation | None = None
    limit: Limit | None = None
    status: Status | None = None
    peer_addresses: tuple[bytes, ...] = ()
    """With `peer`. From our relays: where the peer is seen, told only to a peer that is seen at the same place."""


@dataclass(frozen=True, slots=True)
class StopMessage:
    """Between the relay and the peer that holds the reservation."""

    type: StopType
    peer: str | None = None
    limit: Limit | None = None
    status: Status | None = None
    peer_addresses: tuple[bytes, ...] = ()
    """As in `HopMessage`."""


@dataclass(frozen=True, slots=True)
class HolePunch:
    """Between the ends of a relayed connection. Addresses are binary multiaddrs, foreign until parsed."""

    type: PunchType
    addresses: tuple[bytes, ...] = ()


Wire = HopMessage | StopMessage | HolePunch
W = TypeVar("W", HopMessage, StopMessage, HolePunch)


def encode(message: Wire) -> bytes:
    """Length as a varint, then the message."""
    if isinstance(message, HopMessage):
        body = _number(1, message.type) + _peer(2, message.peer, message.peer_addresses)
        if message.reservation is not None:
            body += _bytes(3, _encode_reservation(message.reservation))
        body += _limit(4, message.limit) + (b"" if message.status is None else _number(5, message.status))
    elif isinstance(message, StopMessage):
        body = _number(1, message.type) + _peer(2, message.peer, message.peer_addresses) + _limit(3, message.limit)
        body += b"" if message.status is None else _number(4, message.status)
    else:
        body = _number(1, message.type) + b"".join(_bytes(2, address) for address in message.addresses)
    return _varint(len(body)) + body


def decode(body: bytes, kind: type[W]) -> W:
    """A message without its length. Raises MalformedFrame (not protobuf) or SchemaViolation (not this message)."""
    message: Any  # mypy follows the type variable into none of the branches
    fields = _Fields(body)
    if issubclass(kind, HopMessage):
        message = HopMessage(
            type=_known(HopType, fields.number(1)),
            peer=_decode_peer(fields.raw(2)),
            peer_addresses=_decode_peer_addresses(fields.raw(2)),
            reservation=_decode_reservation(fields.raw(3)),
            limit=_decode_limit(fields.raw(4)),
            status=_decode_status(fields.number(5)),
        )
    elif issubclass(kind, StopMessage):
        message = StopMessage(
            type=_known(StopType, fields.number(1)),
            peer=_decode_peer(fields.raw(2)),
            peer_addresses=_decode_peer_addresses(fields.raw(2)),
            limit=_decode_limit(fields.raw(3)),
            status=_decode_status(fields.number(4)),
        )
    else:
        message = HolePunch(type=_known(PunchType, fields.number(1)), addresses=fields.addresses(2))
    return message  # type: ignore[no-any-return]


async def read_message(stream: Stream, kind: type[W]) -> W:
    """The next message of a stream and not one byte more: what follows may belong to a connection relayed in it.

    Raises what `decode` does, FrameTooLarge, and Truncated when the stream ends.
    """
    length = 0
    for place in range(_VARINT_BYTES_MAX):
        byte = (await _exactly(stream, 1))[0]
        length |= (byte & 0x7F) << (7 * place)
        if length > MESSAGE_BYTES_MAX:
            raise FrameTooLarge(f"a {kind.__name__} of {length} bytes or more; at most {MESSAGE_BYTES_MAX} are allowed")
        if not byte & 0x80:
            return decode(await _exactly(stream, length), kind)
    raise MalformedFrame("a length that does not end")


async def _exactly(stream: Stream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await stream.receive_some(count - len(data))
        if not part:
            raise Truncated(f"the stream from {stream.peer} ended within a message")
        data += part
    return data


# Encoding.


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _peer(field: int, peer: str | None, addresses: tuple[bytes, ...]) -> bytes:
    if peer is None:
        return b""
    return _bytes(field, _bytes(1, base58.b58decode(peer)) + b"".join(_bytes(2, address) for address in addresses))


def _limit(field: int, limit: Limit | None) -> bytes:
    if limit is None:
        return b""
    return _bytes(field, _number(1, limit.duration_seconds) + _number(2, limit.data_bytes))


def _encode_reservation(reservation: Reservation) -> bytes:
    addresses = b"".join(_bytes(2, address) for address in reservation.addresses)
    return _number(1, reservation.expires_unix_seconds) + addresses


# Decoding.


class _Fields:
    """The fields of one message, by number. Of a repeated single field the last counts, as in protobuf."""

    def __init__(self, body: bytes) -> None:
        self._fields: dict[int, list[int | bytes]] = {}
        for number, value in _parse(body):
            self._fields.setdefault(number, []).append(value)

    def number(self, field: int) -> int | None:
        """A number, None when absent."""
        value = self._last(field)
        if isinstance(value, bytes):
            raise SchemaViolation(f"field {field} is bytes, not a number")
        return value

    def raw(self, field: int) -> bytes | None:
        """Bytes, None when absent."""
        value = self._last(field)
        if isinstance(value, int):
            raise SchemaViolation(f"field {field} is a number, not bytes")
        return value

    def addresses(self, field: int) -> tuple[bytes, ...]:
        """The first ones, as many as we would ever look at; peers of other makes list more."""
        kept: list[bytes] = []
        for value in self._fields.get(field, ())[:ADDRESSES_MAX]:
            if isinstance(value, int):
                raise SchemaViolation(f"field {field} is a number, not an address")
            if len(value) <= ADDRESS_BYTES_MAX:
                kept.append(value)
        return tuple(kept)

    def _last(self, field: int) -> int | bytes | None:
        values = self._fields.get(field)
        return values[-1] if values else None


def _parse(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(body):
        key, at = _read_varint(body, at)
        field, kind = key >> 3, key & 7
        if field == 0:
            raise MalformedFrame("field number 0")
        if kind == _VARINT:
            value, at = _read_varint(body, at)
            yield field, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(body, at)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise MalformedFrame(f"wire type {kind}")
        if length > len(body) - at:
            raise MalformedFrame("a field longer than its message")
        if kind == _BYTES:
            yield field, body[at : at + length]
        at += length


def _read_varint(body: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_VARINT_BYTES_MAX):
        if at + place >= len(body):
            raise MalformedFrame("a number cut short")
        byte = body[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if not byte & 0x80:
            if value >= 1 << 64:
                raise MalformedFrame("a number above 64 bits")
            return value, at + place + 1
    raise MalformedFrame("a number that does not end")


E = TypeVar("E", bound=IntEnum)


def _known(kind: type[E], value: int | None) -> E:
    try:
        return kind(0 if value is None else value)  # an absent number is 0 to writers of proto3
    except ValueError as error:
        raise SchemaViolation(f"{kind.__name__} {value}") from error


def _decode_status(value: int | None) -> Status | None:
    if value is None:
        return None
    try:
        return Status(value)
    except ValueError:
        return Status.MALFORMED_MESSAGE


def _decode_peer(body: bytes | None) -> str | None:
    if body is None:
        return None
    peer = _Fields(body).raw(1)
    if not peer or len(peer) > PEER_ID_BYTES_MAX:
        raise SchemaViolation("a peer without a peer id")
    return base58.b58encode(peer).decode()


def _decode_peer_addresses(body: bytes | None) -> tuple[bytes, ...]:
    return () if body is None else _Fields(body).addresses(2)


def _decode_limit(body: bytes | None) -> Limit | None:
    if body is None:
        return None
    fields = _Fields(body)
    return Limit(duration_seconds=fields.number(1) or 0, data_bytes=fields.number(2) or 0)


def _decode_reservation(body: bytes | None) -> Reservation | None:
    if body is None:
        return None
    fields = _Fields(body)
    return Reservation(expires_unix_seconds=fields.number(1) or 0, addresses=fields.addresses(2))
