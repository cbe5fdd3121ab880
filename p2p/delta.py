"""A snapshot as its difference to another one (DESIGN section 8): files to a file and back, frame by frame.

    "E2DELTA1"
    SHA-256 of the base, SHA-256 of the new snapshot         32 bytes each
    length of the base, length of the new snapshot           le64 each
    number of spans                                          le32
    spans        kind u8, length le64                        in the order of the new file, which they cover
    frames       code u8, varint length of the payload, payload

Spans are cut into frames of `delta_frames.frame_bytes`; a frame's base are the bytes at the same offset. A base of
another layout is bytes throughout, and what lies beyond its end is sent as it is.

The encoder is deterministic: the same two files give the same bytes (with one build of zlib). The decoder makes a new
file that appears only whole, and only when its SHA-256 is the one its caller expects from a signed manifest: whatever a
delta holds, a wrong byte is never installed. Both need a few frames of memory, whatever the files' size.
"""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .delta_bits import VARINT_BYTES_MAX, Reader, varint
from .delta_frames import decode_frame, encode_frame, frame_bytes, payload_bytes_max
from .disk_files import sync
from .errors import BadDelta
from .gguf_layout import Kind, Span, layout_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from .delta_frames import Bytes

MAGIC = b"E2DELTA1"
HEAD = struct.Struct("<8s32s32sQQI")
SPAN = struct.Struct("<BQ")

SPANS_MAX = 1 << 16
"""A model has some hundred tensors; their spans are 9 bytes each."""


@dataclass(frozen=True, slots=True)
class DeltaHead:
    """What a delta says of itself. Hints: only the caller's own hash of the new snapshot decides."""

    base_sha256: bytes
    new_sha256: bytes
    base_bytes: int
    new_bytes: int
    spans: tuple[Span, ...]


def encode_delta(base: Path, new: Path, out: Path) -> DeltaHead:
    """Write the delta from `base` to `new` into the new file `out`, durably. Raises FileExistsError, OSError."""
    with _new_file(out, "a delta") as file, base.open("rb") as old, new.open("rb") as young:
        return _encode(old, young, file)


def decode_delta(base: Path, delta: BinaryIO, out: Path, *, sha256: bytes, length_bytes: int) -> None:
    """Write the snapshot that `delta` makes of `base` into the new file `out`, durably, if it is the one expected.

    `sha256` and `length_bytes` are a signed manifest's. `delta` (buffered: it gives as much as is asked) is read
    once, from where it stands.
    Raises BadDelta, FileExistsError, OSError; then there is no file `out`.
    """
    with _new_file(out, "a snapshot") as file, base.open("rb") as old:
        head = read_head(delta)
        if (head.new_sha256, head.new_bytes) != (sha256, length_bytes):
            raise BadDelta("the delta makes another snapshot than the one that was announced")
        if os.fstat(old.fileno()).st_size != head.base_bytes:
            raise BadDelta("the delta was made for another base than the one that is here")
        _decode(head, old, delta, file)


@contextmanager
def _new_file(out: Path, what: str) -> Iterator[BinaryIO]:
    """A file that is `out`, durably, once the block has ended well; else there is none. Raises FileExistsError."""
    if out.exists():
        raise FileExistsError(f"{out} exists, and {what} is never written over")
    unfinished = out.with_name(f"{out.name}.partial")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(out)
    sync(out.parent)


def read_head(delta: BinaryIO) -> DeltaHead:
    """The head, its spans checked against its lengths. Raises BadDelta."""
    magic, base_sha256, new_sha256, base_bytes, new_bytes, count = HEAD.unpack(_exactly(delta, HEAD.size))
    if magic != MAGIC:
        raise BadDelta("this is no delta, or one of a later release")
    if count > SPANS_MAX:
        raise BadDelta(f"a delta of {count} spans, more than the {SPANS_MAX} that a snapshot can have")
    spans = []
    end = 0
    for kind, length in SPAN.iter_unpack(_exactly(delta, SPAN.size * count)):
        if kind not in Kind.__members__.values() or not length:
            raise BadDelta(f"a delta with a span of the kind {kind}, {length} bytes long")
        end += length
        if kind != Kind.NEW and end > base_bytes:
            raise BadDelta("a delta with a span beyond the end of its base")
        spans.append(Span(Kind(kind), length))
    if end != new_bytes:
        raise BadDelta(f"the spans of a delta cover {end} bytes of {new_bytes}")
    return DeltaHead(base_sha256, new_sha256, base_bytes, new_bytes, tuple(spans))


def _encode(old: BinaryIO, young: BinaryIO, file: BinaryIO) -> DeltaHead:
    base_bytes, new_bytes = (os.fstat(each.fileno()).st_size for each in (old, young))
    spans = _common_layout(old, base_bytes, young, new_bytes)
    file.seek(HEAD.size)
    file.write(b"".join(SPAN.pack(span.kind, span.length_bytes) for span in spans))
    base_hash, new_hash = hashlib.sha256(), hashlib.sha256()
    for kind, length in _frames(spans):
        base = b"" if kind == Kind.NEW else _exactly(old, length)
        new = _exactly(young, length)
        base_hash.update(base)
        new_hash.update(new)
        code, payload = encode_frame(kind, np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8))
        file.write(bytes([code]) + varint(len(payload)) + payload)
    while rest := old.read(frame_bytes(Kind.BYTES)):  # of a base that is longer
        base_hash.update(rest)
    head = DeltaHead(base_hash.digest(), new_hash.digest(), base_bytes, new_bytes, spans)
    file.seek(0)
    file.write(HEAD.pack(MAGIC, head.base_sha256, head.new_sha256, base_bytes, new_bytes, len(spans)))
    return head


def _decode(head: DeltaHead, old: BinaryIO, delta: BinaryIO, file: BinaryIO) -> None:
    found = hashlib.sha256()
    for kind, length in _frames(head.spans):
        frame = np.zeros(length, dtype=np.uint8)
        if kind != Kind.NEW:
            _fill(old, frame)
        code, size = _exactly(delta, 1)[0], _read_varint(delta, payload_bytes_max(length))
        decode_frame(kind, code, memoryview(_exactly(delta, size)), frame)
        found.update(frame.data)
        file.write(frame.data)
    if delta.read(1):
        raise BadDelta("the delta goes on after its last frame")
    if found.digest() != head.new_sha256:
        raise BadDelta("the delta does not make the snapshot that was announced from the base that is here")


def _common_layout(old: BinaryIO, base_bytes: int, young: BinaryIO, new_bytes: int) -> tuple[Span, ...]:
    """The layout of both when it is the same, else bytes; at the end both files are at their start."""
    layouts = layout_of(old, base_bytes), layout_of(young, new_bytes)
    old.seek(0)
    young.seek(0)
    if layouts[0] == layouts[1] and len(layouts[0]) <= SPANS_MAX:
        return layouts[0]
    common = min(base_bytes, new_bytes)
    spans = Span(Kind.BYTES, common), Span(Kind.NEW, new_bytes - common)
    return tuple(span for span in spans if span.length_bytes)


def _frames(spans: tuple[Span, ...]) -> Iterator[tuple[Kind, int]]:
    for span in spans:
        most = frame_bytes(span.kind)
        for start in range(0, span.length_bytes, most):
            yield span.kind, min(most, span.length_bytes - start)


def _read_varint(delta: BinaryIO, limit: int) -> int:
    data = bytearray()
    while len(data) < VARINT_BYTES_MAX:
        data += _exactly(delta, 1)
        if data[-1] < 0x80:
            break
    return Reader(bytes(data)).varint(limit)


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise BadDelta("a file of a delta ends too soon")
    return data


def _fill(file: BinaryIO, frame: Bytes) -> None:
    if file.readinto(frame.data) != len(frame):  # type: ignore[attr-defined]
        raise BadDelta("the base is shorter than it was")
