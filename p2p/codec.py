"""Bytes to records and back. Pure. Order of checks: size, schema, meaning (DESIGN section 6)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import numpy as np
from pydantic import ValidationError

from .errors import FrameTooLarge, MalformedFrame, OwnFrameTooLarge, SchemaViolation, UnexpectedMessage
from .messages import CHUNK_BYTES_MAX, Chunk, Message, Record, Refusal
from .unpack import unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from .transport import Piece

R = TypeVar("R", bound=Record)
M = TypeVar("M", bound=Message)

LENGTH = struct.Struct(">I")
END = LENGTH.pack(0)
"""A frame of length 0: the sender has said everything. A stream that ends without it was cut."""

SHORT = struct.Struct(">H")

SPLIT_BYTES = 4096
"""Data of a chunk below it are not worth a piece of their own."""

_CHUNK_DATA = bytes(msgpack.packb("data"))
_CHUNK_START = bytes(msgpack.packb({"type": Chunk.TYPE, "body": {"index": 0, "data": 0}}))[: -len(_CHUNK_DATA) - 2]
"""A chunk's frame up to its index, and what stands between the index and the data."""

_INTEGER_BYTES = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
"""What msgpack's unsigned integers take, by their first byte; those below 128 are their first byte."""

CHUNK_HEAD_BYTES_MAX = len(_CHUNK_START) + 9 + len(_CHUNK_DATA) + 5
"""A chunk's frame up to its data, at the most."""

ERRORS_TOLD_MAX = 16
"""Of a record with more errors the first is not picked out: pydantic writes all of them up to tell it."""


def encode_record(record: Record) -> bytes:
    """The canonical bytes of a record: what gets signed and hashed. Field order is the declared one."""
    return bytes(msgpack.packb(record.model_dump(), use_bin_type=True))


def decode_record(data: bytes, kind: type[R]) -> R:
    """Parse bytes whose size is already bounded and, if they were signed, whose signature already held.

    Raises MalformedFrame or SchemaViolation.
    """
    return _validate(_unpack(data, kind), kind)


def encode_frame(message: Message) -> bytes:
    """Length, then the msgpack map. Raises OwnFrameTooLarge when the message is above its own type's bound."""
    body = msgpack.packb({"type": message.TYPE, "body": message.model_dump()}, use_bin_type=True)
    if len(body) > message.BYTES_MAX:
        raise OwnFrameTooLarge(f"{message.TYPE} of {len(body)} bytes is above its bound of {message.BYTES_MAX}")
    return LENGTH.pack(len(body)) + bytes(body)


def frame_parts(message: Message) -> tuple[bytes, ...]:
    """`encode_frame(message)` in pieces to be sent one after the other: a chunk's data are not copied."""
    if type(message) is not Chunk or not SPLIT_BYTES <= len(message.data) <= CHUNK_BYTES_MAX:
        return (encode_frame(message),)
    data = message.data
    head = _CHUNK_START + msgpack.packb(message.index) + _CHUNK_DATA
    head += b"\xc5" + SHORT.pack(len(data)) if len(data) < 1 << 16 else b"\xc6" + LENGTH.pack(len(data))
    return LENGTH.pack(len(head) + len(data)) + head, data


def decode_parts(parts: Sequence[Piece], *expected: type[M]) -> M | Refusal:
    """`decode_frame` of a body that came in pieces: a chunk's data are put together once and not copied again."""
    found = _chunk_head(parts) if Chunk in expected else None
    if found is None:
        return decode_frame(b"".join(parts), *expected)
    index, start = found
    data = b"".join((memoryview(parts[0])[start:], *parts[1:]))
    chunk: M = _validate({"index": index, "data": data}, Chunk)  # type: ignore[assignment]  # one of those expected
    return chunk


def _chunk_head(parts: Sequence[Piece]) -> tuple[int, int] | None:
    """(index, where its data begin) of a chunk written as `frame_parts` does; None for any other frame."""
    head = bytes(parts[0][:CHUNK_HEAD_BYTES_MAX])
    at = len(_CHUNK_START)
    if len(head) < CHUNK_HEAD_BYTES_MAX or not head.startswith(_CHUNK_START):
        return None
    name = at + _INTEGER_BYTES.get(head[at], 1)
    kind = name + len(_CHUNK_DATA)
    if head[at] in range(0x80, 0xCC) or head[at] > 0xCF or head[name:kind] != _CHUNK_DATA:
        return None
    announced = {0xC5: SHORT, 0xC6: LENGTH}.get(head[kind])
    if announced is None:
        return None
    (length,) = announced.unpack_from(head, kind + 1)
    start = kind + 1 + announced.size
    if not SPLIT_BYTES <= length <= CHUNK_BYTES_MAX or start + length != sum(map(len, parts)):
        return None
    return int(msgpack.unpackb(head[at:name])), start


def check_length(length: int, expected: Iterable[type[Message]]) -> None:
    """Raise FrameTooLarge if no expected type (a Refusal may always come) can be this long. Before allocation."""
    bound = max([Refusal.BYTES_MAX, *(kind.BYTES_MAX for kind in expected)])
    if length > bound:
        raise FrameTooLarge(f"frame of {length} bytes announced, at most {bound} expected")


def decode_frame(body: bytes, *expected: type[M]) -> M | Refusal:
    """Parse a frame's body as one of the expected types, or as a Refusal.

    Raises MalformedFrame, UnexpectedMessage, FrameTooLarge (above its own type's bound) or SchemaViolation.
    """
    frame = _unpack(body, Refusal, *expected)
    if set(frame) != {"type", "body"} or not isinstance(frame["body"], dict):
        raise SchemaViolation("a frame is a map of `type` and `body`")
    kinds: dict[str, type[Any]] = {Refusal.TYPE: Refusal} | {kind.TYPE: kind for kind in expected}
    kind = kinds.get(frame["type"]) if isinstance(frame["type"], str) else None
    if kind is None:
        name = repr(frame["type"])[:40]
        raise UnexpectedMessage(f"got {name}, expected {' or '.join(k.TYPE for k in expected)}")
    if len(body) > kind.BYTES_MAX:
        raise FrameTooLarge(f"{kind.TYPE} of {len(body)} bytes is above its bound of {kind.BYTES_MAX}")
    message: M | Refusal = _validate(frame["body"], kind)
    return message


def _unpack(data: bytes, *expected: type[Record]) -> dict[str, Any]:
    try:
        value = unpack(data, *expected)
    # msgpack raises ValueError and its subclasses (UnicodeDecodeError too); deep nesting is its StackError, and an
    # array used as a map key is a TypeError.
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise MalformedFrame(f"not a msgpack value: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise MalformedFrame(f"a msgpack map was expected, not {type(value).__name__}")
    return value


def _validate(value: dict[str, Any], kind: type[R]) -> R:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        if error.error_count() > ERRORS_TOLD_MAX:
            raise SchemaViolation(f"{kind.__name__}: {error.error_count()} errors") from None
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part)[:32] for part in first["loc"][:6])
        raise SchemaViolation(f"{kind.__name__}.{where}: {first['msg']}"[:300]) from error


def pack_tokens(tokens: ArrayLike) -> bytes:
    """Token ids, any integer sequence -> raw little-endian int32."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> NDArray[np.int32]:
    """Raw little-endian int32 -> read-only array of token ids. Raises SchemaViolation on a ragged length."""
    if len(data) % 4:
        raise SchemaViolation(f"token bytes come in fours, got {len(data)}")
    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: ArrayLike) -> bytes:
    """Log-probabilities -> raw little-endian float32."""
    return np.ascontiguousarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(data: bytes) -> NDArray[np.float32]:
    """Raw little-endian float32 -> read-only array. Raises SchemaViolation when ragged or not finite."""
    if len(data) % 4:
        raise SchemaViolation(f"log-probability bytes come in fours, got {len(data)}")
    values = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(values).all():
        raise SchemaViolation("a log-probability is not a finite number")
    return values
