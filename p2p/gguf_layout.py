"""Which bytes of a snapshot are what: a GGUF file's tensors as spans of one element type. Pure.

Only what a delta needs is read: where the header ends, and type, shape and offset of each tensor. The file is the
learner's own; one that is not as expected is no error, but a single span of bytes.

    "GGUF", version u32, tensors u64, pairs u64
    pairs:   key, type u32, value        a string is its length u64 and its bytes; an array its type u32, length u64
    tensors: name, dimensions u32, each u64, type u32, offset u64 from the data's start, which is aligned
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import BinaryIO


class Kind(IntEnum):
    """What a span consists of; the numbers are those of the delta format."""

    BYTES = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    Q8_0 = 4
    NEW = 5
    """Bytes of the new file that have no counterpart in the base."""


@dataclass(frozen=True, slots=True)
class Span:
    """`length_bytes` of one kind; spans follow each other without gaps from the start of the file."""

    kind: Kind
    length_bytes: int


PAIRS_MAX = 1 << 16
TENSORS_MAX = 1 << 16
LENGTH_MAX = 1 << 28
"""Of a string in bytes, and of an array in elements: a vocabulary has below a million tokens."""

_ALIGNMENT_KEY = b"general.alignment"
_ALIGNMENT = 32
_STRING, _ARRAY, _U32 = 8, 9, 4
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each of GGUF's types of single values."""

_TENSORS = {0: (Kind.F32, 1, 4), 1: (Kind.F16, 1, 2), 8: (Kind.Q8_0, 32, 34), 30: (Kind.BF16, 1, 2)}
"""GGML's types: what they are here, and how many numbers are how many bytes."""


class _OtherFile(Exception):
    """Not a GGUF file as expected."""


def layout_of(file: BinaryIO, length_bytes: int) -> tuple[Span, ...]:
    """The spans of a file of this length, `file` being at its start. Neighbours of one kind are one span."""
    try:
        found = _tensors(_Source(file, length_bytes))
    except _OtherFile:
        found = []
    spans: list[Span] = []
    end = 0
    for offset, kind, length in sorted(found):
        if offset < end or offset + length > length_bytes:
            return _merged([Span(Kind.BYTES, length_bytes)])
        spans += [Span(Kind.BYTES, offset - end), Span(kind, length)]
        end = offset + length
    return _merged([*spans, Span(Kind.BYTES, length_bytes - end)])


def _merged(spans: list[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for span in spans:
        if not span.length_bytes:
            continue
        if merged and merged[-1].kind == span.kind:
            merged[-1] = Span(span.kind, merged[-1].length_bytes + span.length_bytes)
        else:
            merged.append(span)
    return tuple(merged)


class _Source:
    def __init__(self, file: BinaryIO, length_bytes: int) -> None:
        self._file = file
        self._length_bytes = length_bytes
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > self._length_bytes - self.at:
            raise _OtherFile
        self.at += count
        data = self._file.read(count)
        if len(data) != count:
            raise _OtherFile
        return data

    def skip(self, count: int) -> None:
        if count > self._length_bytes - self.at:
            raise _OtherFile
        self.at += count
        self._file.seek(self.at)

    def number(self, form: str, limit: int) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        if value > limit:
            raise _OtherFile
        return int(value)

    def string(self) -> bytes:
        return self.take(self.number("<Q", LENGTH_MAX))

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.skip(self.number("<Q", LENGTH_MAX))
        elif kind == _ARRAY:
            inner, count = self.number("<I", 12), self.number("<Q", LENGTH_MAX)
            if inner in _SCALARS:
                self.skip(_SCALARS[inner] * count)
            elif inner == _STRING:
                for _ in range(count):
                    self.skip(self.number("<Q", LENGTH_MAX))
            else:
                raise _OtherFile  # arrays of arrays: nobody writes them
        else:
            self.skip(_SCALARS[kind])


def _tensors(source: _Source) -> list[tuple[int, Kind, int]]:
    if source.take(4) != b"GGUF" or source.number("<I", 3) < 2:
        raise _OtherFile
    tensors, pairs = source.number("<Q", TENSORS_MAX), source.number("<Q", PAIRS_MAX)
    alignment = _ALIGNMENT
    for _ in range(pairs):
        key, kind = source.string(), source.number("<I", 12)
        if key == _ALIGNMENT_KEY and kind == _U32:
            alignment = source.number("<I", 1 << 16) or _ALIGNMENT
        else:
            source.skip_value(kind)
    found = []
    for _ in range(tensors):
        source.string()
        elements = 1
        for _ in range(source.number("<I", 8)):
            elements *= source.number("<Q", 1 << 48)
        kind, offset = source.number("<I", 255), source.number("<Q", 1 << 62)
        if kind in _TENSORS:
            known, numbers, size = _TENSORS[kind]
            found.append((offset, known, elements // numbers * size))
    start = -(-source.at // alignment) * alignment
    return [(start + offset, kind, length) for offset, kind, length in found]
