"""One frame of a delta: up to 4 MiB of a snapshot of one kind of element, from the base's bytes. Pure, numpy.

| code | payload                                            | right for                                   |
|------|----------------------------------------------------|---------------------------------------------|
| 0    | nothing: as in the base                            | headers; a model that did not move          |
| 1    | the bytes themselves                               | what no code makes shorter                  |
| 2    | XOR with the base, byte by byte of each element, deflated | bytes, and where much has changed    |
| 3    | `delta_classes`, once for floats, twice for Q8_0   | what a step of training does to weights     |

A float is taken for an integer of its width that is ordered as floats are, so its next neighbour is one step away; its
key is its exponent. In Q8_0 the 32 numbers of a block have the exponent of the block's scale as their key, and so has
the scale; the numbers come first (varint bytes, then their payload), since the scales of the base are their keys.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .delta_bits import Reader, varint
from .delta_classes import SORTED_KEYS, TooDense, decode_changes, encode_changes
from .errors import BadDelta
from .gguf_layout import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MIB = 1 << 20
SAME, STORED, XORED, CLASSES = 0, 1, 2, 3
BLOCK, BLOCK_BYTES = 32, 34
"""Q8_0: so many numbers share a scale, two bytes and then one for each."""

DEFLATE_LEVEL = 6


@dataclass(frozen=True, slots=True)
class _Float:
    """A float of `width` bytes: the type of the integers it is taken for, and where its exponent is in them."""

    width: int
    integer: np.dtype
    shift: int
    mask: int


_FLOATS = {
    Kind.F32: _Float(4, np.dtype("<i4"), 23, 0xFF),
    Kind.F16: _Float(2, np.dtype("<i2"), 10, 0x1F),
    Kind.BF16: _Float(2, np.dtype("<i2"), 7, 0xFF),
}
_WIDTHS = {Kind.F32: 4, Kind.F16: 2, Kind.BF16: 2, Kind.Q8_0: BLOCK_BYTES}


def frame_bytes(kind: Kind) -> int:
    """The most that a frame of this kind holds: whole elements, few enough that all of them may have changed in f32."""
    limit = 2 * MIB if kind == Kind.F32 else 4 * MIB
    return limit // _WIDTHS.get(kind, 1) * _WIDTHS.get(kind, 1)


def payload_bytes_max(length_bytes: int) -> int:
    """No frame's payload is longer: the encoder would rather have stored it."""
    return length_bytes


def encode_frame(kind: Kind, base: Bytes, new: Bytes) -> tuple[int, bytes]:
    """The shortest code and its payload; `base` is empty for what has no counterpart."""
    if len(base) and np.array_equal(base, new):
        return SAME, b""
    found = [(STORED, new.tobytes())]
    classes = _encode_classes(kind, base, new) if _is_whole(kind, base) else None
    if classes is not None and 8 * len(classes) < len(new):
        found = [(CLASSES, classes)]  # deflate is slow, and never better on so few changes
    else:
        found.append((XORED, _deflate(_shuffled(new ^ base if len(base) else new, kind))))
        found += [(CLASSES, classes)] if classes is not None else []
    return min(found, key=lambda pair: len(pair[1]))


def decode_frame(kind: Kind, code: int, payload: memoryview, frame: Bytes) -> None:
    """Turn `frame`, the base's bytes (zeros for what has no counterpart), into the new ones. Raises BadDelta."""
    if code == SAME:
        if len(payload):
            raise BadDelta("a delta's frame of no change has a payload")
    elif code == STORED:
        if len(payload) != len(frame):
            raise BadDelta(f"a delta's frame stores {len(payload)} bytes for {len(frame)}")
        frame[:] = np.frombuffer(payload, dtype=np.uint8)
    elif code == XORED:
        _unshuffle(_inflate(payload, len(frame)), kind, frame)
    elif code == CLASSES and _is_whole(kind, frame):
        _decode_classes(kind, payload, frame)
    else:
        raise BadDelta(f"a delta's frame has the unknown code {code}")


def _is_whole(kind: Kind, frame: Bytes) -> bool:
    return kind in _WIDTHS and len(frame) > 0 and len(frame) % _WIDTHS[kind] == 0


# classes


def _ordered(values: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
    """A float's bits, as a signed integer, in the order of floats; its own inverse."""
    most = np.iinfo(values.dtype).max
    return np.where(values < 0, values ^ most, values)


def _keys(values: NDArray[np.signedinteger], shift: int, mask: int) -> Bytes:
    keys = np.empty(len(values), dtype=np.uint8)
    for start in range(0, len(values), SORTED_KEYS):
        part = values[start : start + SORTED_KEYS]
        keys[start : start + SORTED_KEYS] = part >> shift & mask
    return keys


def _encode_classes(kind: Kind, base: Bytes, new: Bytes) -> bytes | None:
    try:
        if kind != Kind.Q8_0:
            form = _FLOATS[kind]
            before, after = base.view(form.integer), new.view(form.integer)
            return _encode_floats(form, before, after, _keys(before, form.shift, form.mask))
        scales, scales_after = (_scales(blocks).copy() for blocks in (base, new))
        numbers, numbers_after = (blocks.reshape(-1, BLOCK_BYTES)[:, 2:] for blocks in (base, new))
        half = _FLOATS[Kind.F16]
        keys = _keys(scales, half.shift, half.mask)
        places = np.flatnonzero(numbers != numbers_after)
        at = np.divmod(places, BLOCK)
        moves = (numbers_after[at] - numbers[at]).view(np.int8).astype(np.int64)
        payload = encode_changes(keys, BLOCK, places, moves, 1)
        return varint(len(payload)) + payload + _encode_floats(half, scales, scales_after, keys)
    except TooDense:
        return None


def _encode_floats(
    form: _Float, before: NDArray[np.signedinteger], after: NDArray[np.signedinteger], keys: Bytes
) -> bytes:
    places = np.flatnonzero(before != after)
    moves = _ordered(after[places]).astype(np.int64) - _ordered(before[places])
    return encode_changes(keys, 1, places, moves, form.width)


def _decode_classes(kind: Kind, payload: memoryview, frame: Bytes) -> None:
    if kind != Kind.Q8_0:
        form = _FLOATS[kind]
        values = frame.view(form.integer)
        _decode_floats(form, payload, values, _keys(values, form.shift, form.mask))
        return
    reader = Reader(payload)
    first = reader.take(reader.varint(len(payload)))
    half, scales, numbers = _FLOATS[Kind.F16], _scales(frame), frame.reshape(-1, BLOCK_BYTES)[:, 2:]
    keys = _keys(scales, half.shift, half.mask)
    for places, moves in decode_changes(keys, BLOCK, first, 1):
        numbers[np.divmod(places, BLOCK)] += moves.astype(np.uint8)  # modulo 256
    _decode_floats(half, reader.rest(), scales, keys)


def _decode_floats(form: _Float, payload: memoryview, values: NDArray[np.signedinteger], keys: Bytes) -> None:
    for places, moves in decode_changes(keys, 1, payload, form.width):
        moved = _ordered(values[places]) + moves  # 64 bits: cut to the width below, whatever the sum
        values[places] = _ordered(moved.astype(form.integer))


def _scales(blocks: Bytes) -> NDArray[np.signedinteger]:
    """The scales within whole blocks: a view, two bytes in every 34."""
    return np.ndarray(len(blocks) // BLOCK_BYTES, np.dtype("<i2"), blocks.data, 0, (BLOCK_BYTES,))


# XOR


def _shuffled(data: Bytes, kind: Kind) -> bytes:
    width = _WIDTHS.get(kind, 1)
    return data.reshape(-1, width).T.tobytes() if len(data) % width == 0 else data.tobytes()


def _unshuffle(data: Bytes, kind: Kind, frame: Bytes) -> None:
    width = _WIDTHS.get(kind, 1)
    if len(frame) % width == 0:
        elements = frame.reshape(-1, width)
        elements ^= data.reshape(width, -1).T
    else:
        frame ^= data


def _deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(DEFLATE_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def _inflate(payload: memoryview, length: int) -> Bytes:
    """Exactly `length` bytes: what would be more is refused before it is made."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = unpacker.decompress(payload, length + 1)  # one more, to see the end of a stream that is long enough
    except zlib.error as error:
        raise BadDelta(f"a delta's frame cannot be inflated: {error}") from error
    if len(data) != length or not unpacker.eof or unpacker.unused_data:
        raise BadDelta(f"a delta's frame does not inflate to {length} bytes")
    return np.frombuffer(data, dtype=np.uint8)
