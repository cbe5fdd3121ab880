"""Numbers as bits, many at once: varints, Rice codes, fixed widths. Pure, numpy; the bottom of the delta code.

A Rice code of parameter k writes a number v as v >> k in unary (so many 0 bits, then a 1) and its k low bits as they
are: the right code for gaps between events of a constant rate. All unary parts stand in one string of bits and all low
parts of one k in another, so both are taken apart by whole-array operations. Bit 7 of a byte comes first in unary
strings (numpy's order); low parts are little-endian.

Everything read here may come from a hostile peer: counts are bounded by the caller before arrays are made, and what
does not fit is `errors.BadDelta`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import BadDelta

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

K_MAX = 31
"""No number is above 32 bits."""

VARINT_BYTES_MAX = 6


class Reader:
    """Bytes taken from the front; every method raises BadDelta where they end too soon."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        if count > len(self._data) - self._at:
            raise BadDelta("a delta's frame ends in the middle of a field")
        self._at += count
        return self._data[self._at - count : self._at]

    def rest(self) -> memoryview:
        """All that was not taken."""
        return self.take(len(self._data) - self._at)

    def byte(self) -> int:
        """One byte as a number."""
        return self.take(1)[0]

    def varint(self, limit: int) -> int:
        """A number of seven bits a byte, low ones first; BadDelta above `limit`."""
        value = 0
        for place in range(VARINT_BYTES_MAX):
            byte = self.byte()
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                if value > limit:
                    raise BadDelta(f"a delta's frame announces {value} where at most {limit} can be")
                return value
        raise BadDelta("a delta's frame holds an endless number")

    def end(self) -> None:
        """Raise BadDelta unless everything was taken."""
        if self._at != len(self._data):
            raise BadDelta(f"a delta's frame has {len(self._data) - self._at} bytes too many")


def varint(value: int) -> bytes:
    """As `Reader.varint` takes it."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def best_k(values: Numbers) -> int:
    """The Rice parameter that makes these numbers shortest."""
    if not len(values):
        return 0
    near = max(0, int(values.mean() + 1).bit_length() - 1)
    candidates = range(max(0, near - 3), min(K_MAX, near + 2) + 1)
    return min(candidates, key=lambda k: int((values >> k).sum()) + k * len(values))


def pack_unary(values: Numbers) -> bytes:
    """Each as so many 0 bits and a 1."""
    ones = np.cumsum(values + 1) - 1
    bits = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, dtype=np.uint8)
    bits[ones] = 1
    return np.packbits(bits).tobytes()


def unpack_unary(data: memoryview, count: int) -> Numbers:
    """The `count` numbers of `pack_unary`. Eight times as much memory as `data`."""
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))
    if np.count_nonzero(bits) != count:
        raise BadDelta(f"a delta's frame does not hold the {count} numbers it announces")
    return np.diff(np.flatnonzero(bits), prepend=-1) - 1


def pack_low(values: Numbers, k: int) -> bytes:
    """The k low bits of each."""
    bits = np.empty((len(values), k), dtype=np.uint8)
    for place in range(k):
        bits[:, place] = values >> place & 1
    return np.packbits(bits, bitorder="little").tobytes()


def low_bytes(count: int, k: int) -> int:
    """How long `pack_low` is."""
    return -(-count * k // 8)


def unpack_low(data: memoryview, count: int, k: int) -> Numbers:
    """The numbers of `pack_low`, from exactly `low_bytes` of data."""
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count * k, bitorder="little").reshape(count, k)
    values = np.zeros(count, dtype=np.int64)
    for place in range(k):
        values |= bits[:, place].astype(np.int64) << place
    return values
