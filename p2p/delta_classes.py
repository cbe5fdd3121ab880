"""Where numbers changed and by how much, coded by classes. Pure, numpy.

How often a stored number changes follows from what it was: a step of training moves every weight by about the learning
rate, and the smaller a float's exponent, the finer its last place. So elements are dealt into classes by a key that
both sides know (the exponent in the base), and within a class changes come at a nearly constant rate: the gaps between
them get a Rice code of the class's own parameter, and so do the sizes of the moves. Nothing is sent for the key.

Elements are numbered class by class; within a class block by block of 2^18 keys, there by key, then as in the file.
The payload of one array of elements:

    lowest, highest        bytes; keys outside are in the class of the nearer one
    for each key from lowest to highest:
      flags                0: nothing changed. Else 0x80 | large 0x40 | inverted 0x20 | k of the gaps
      changed              varint
      unchanged            varint, when inverted
      k of the sizes       byte, when large
    gaps, unary            varint bytes, then the bits, all classes in one string
    gaps, low parts        each class from a whole byte
    signs                  one bit a change, 1 down, all classes in one string
    sizes - 1, unary       varint bytes, then the bits, of large classes only
    sizes - 1, low parts   each large class from a whole byte
    escapes                sizes - 1 of which the unary part is ESCAPE, `width` bytes each

Inverted: more than half have changed, so the gaps are those between elements that have not. Not large: every move is
one step. An escape keeps a few long moves (across zero, for one) from costing thousands of unary bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .delta_bits import (
    Reader,
    best_k,
    low_bytes,
    pack_low,
    pack_unary,
    unpack_low,
    unpack_unary,
    varint,
)
from .errors import BadDelta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .delta_bits import Numbers

    Keys = NDArray[np.uint8]

CHANGES_MAX = 1 << 19
"""In one array: an array of 64-bit numbers of them is 4 MiB, and the encoder holds about ten."""

_PLACE_BITS = 18
SORTED_KEYS = 1 << _PLACE_BITS
"""Keys dealt into classes at once: what is done with them stays in a processor's cache."""

ESCAPE = 24

_PRESENT, _LARGE, _INVERTED, _K = 0x80, 0x40, 0x20, 0x1F


class TooDense(Exception):
    """More changes than this code takes: another one is right."""


# which element is which of its class


@dataclass(slots=True)
class _Block:
    """Some keys from `start` on, dealt out: `dealt` are (key << 18 | place in the block) in order.

    Each class is found from `first` on, `counts` times. `seen` is how many elements of it came before this block.
    """

    start: int
    dealt: NDArray[np.uint32]
    first: Numbers
    counts: Numbers
    seen: Numbers


def _blocks(keys: Keys, lanes: int, lowest: int, highest: int) -> Iterator[_Block]:
    firsts = np.arange(lowest, highest + 1, dtype=np.uint32) << np.uint32(_PLACE_BITS)
    firsts[0] = 0
    seen = np.zeros(len(firsts), dtype=np.int64)
    places = np.arange(min(len(keys), SORTED_KEYS), dtype=np.uint32)
    for start in range(0, len(keys), SORTED_KEYS):
        dealt = _tags(keys[start : start + SORTED_KEYS], places)
        dealt.sort()  # vector instructions sort 32-bit numbers faster than bytes can be dealt out
        first = np.searchsorted(dealt, firsts)
        counts = np.diff(first, append=len(dealt))
        yield _Block(start, dealt, first, counts, seen)
        seen = seen + counts * lanes


def _tags(keys: Keys, places: NDArray[np.uint32]) -> NDArray[np.uint32]:
    tags = keys.astype(np.uint32)
    tags <<= np.uint32(_PLACE_BITS)
    tags |= places[: len(tags)]
    return tags


# to bytes


def encode_changes(keys: Keys, lanes: int, places: Numbers, moves: Numbers, width: int) -> bytes:
    """The payload. Element e has the key `keys[e // lanes]`; those at `places`, ascending, moved by `moves`, never 0.

    `width` bytes hold the largest move. Raises TooDense.
    """
    if len(places) > CHANGES_MAX:
        raise TooDense
    lowest, highest = _span_of(keys)
    classes, ranks, totals = _ranks(keys, lanes, places, lowest, highest)
    order = np.argsort(classes.astype(np.int64) << 40 | ranks)
    ends = np.cumsum(np.bincount(classes, minlength=len(totals)))
    head = bytearray([lowest, highest])
    gaps, gap_lows, sizes, size_lows, escapes = [], [], [], [], []
    for number, total in enumerate(totals.tolist()):
        mine = order[ends[number - 1] if number else 0 : ends[number]]
        if not len(mine):
            head.append(0)
            continue
        listed = ranks[mine]
        inverted = 2 * len(mine) > total
        if inverted:
            unchanged = np.ones(total, dtype=bool)
            unchanged[listed] = False
            listed = np.flatnonzero(unchanged)
            if len(listed) > CHANGES_MAX:
                raise TooDense
        gap = np.diff(listed, prepend=-1) - 1
        k = best_k(gap)
        gaps.append(gap >> k)
        gap_lows.append(pack_low(gap, k))
        size = np.abs(moves[mine]) - 1
        large = bool(size.any())
        head.append(_PRESENT | _LARGE * large | _INVERTED * inverted | k)
        head += varint(len(mine))
        if inverted:
            head += varint(len(listed))
        if large:
            k = _best_k_with_escapes(size, width)
            over = size >> k >= ESCAPE
            escapes.append(size[over])
            sizes.append(np.minimum(size >> k, ESCAPE))
            size_lows.append(pack_low(np.where(over, 0, size), k))
            head.append(k)
    signs = np.packbits(moves[order] < 0).tobytes()
    unary_gaps, unary_sizes = pack_unary(_joined(gaps)), pack_unary(_joined(sizes))
    tail = _joined(escapes).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    parts = [bytes(head), varint(len(unary_gaps)), unary_gaps, *gap_lows, signs]
    return b"".join([*parts, varint(len(unary_sizes)), unary_sizes, *size_lows, tail])


def _span_of(keys: Keys) -> tuple[int, int]:
    """Keys that few elements have, at either end, get no class of their own: its head would cost more than it saves."""
    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, len(keys), SORTED_KEYS):
        counts += np.bincount(keys[start : start + SORTED_KEYS], minlength=256)
    below = np.cumsum(counts)
    lowest = min(int(np.searchsorted(below, max(len(keys) >> 12, 16), side="right")), 255)
    highest = int(np.searchsorted(below, len(keys) - (len(keys) >> 8)))
    return lowest, min(max(highest, lowest), 255)


def _ranks(keys: Keys, lanes: int, places: Numbers, lowest: int, highest: int) -> tuple[Keys, Numbers, Numbers]:
    """Of each place its class and its number in it; and how many elements each class has."""
    classes, ranks = np.empty(len(places), dtype=np.uint8), np.empty(len(places), dtype=np.int64)
    totals = np.zeros(highest - lowest + 1, dtype=np.int64)
    done = 0
    for block in _blocks(keys, lanes, lowest, highest):
        end = int(np.searchsorted(places, (block.start + len(block.dealt)) * lanes))
        unit, lane = np.divmod(places[done:end], lanes)
        mine = np.clip(keys[unit], lowest, highest) - np.uint8(lowest)
        tags = _tags(keys[unit], (unit - block.start).astype(np.uint32))
        classes[done:end] = mine
        ranks[done:end] = block.seen[mine] + (np.searchsorted(block.dealt, tags) - block.first[mine]) * lanes + lane
        totals += block.counts * lanes
        done = end
    return classes, ranks, totals


def _best_k_with_escapes(sizes: Numbers, width: int) -> int:
    def cost(k: int) -> int:
        unary = sizes >> k
        return int(np.minimum(unary, ESCAPE).sum()) + k * len(sizes) + 8 * width * int((unary >= ESCAPE).sum())

    return min(range(8 * width), key=cost)


def _joined(parts: list[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


# from bytes


@dataclass(slots=True)
class _Class:
    """What is known of one class: `listed` are numbers within it, of changed elements or, `inverted`, of the others."""

    k: int = 0
    inverted: bool = False
    large: bool = False
    changed: int = 0
    unchanged: int = 0
    k_sizes: int = 0
    listed: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    moves: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    listed_done: int = 0
    moves_done: int = 0


def decode_changes(keys: Keys, lanes: int, payload: memoryview, width: int) -> Iterator[tuple[Numbers, Numbers]]:
    """The places and moves that `encode_changes` was given, some at a time, in no order, no place twice.

    Elements may be changed as they are given, `keys` may not. Raises BadDelta, at the latest at the end: what was given
    by then is to be thrown away.
    """
    elements = len(keys) * lanes
    lowest, highest, classes = _parse(payload, elements, width)
    starts = np.arange(len(classes)) * elements  # numbers within classes, so that all together are in order
    plain = [(start, known) for start, known in zip(starts, classes, strict=True) if not known.inverted]
    marks = _joined([start + known.listed for start, known in plain])
    moves = _joined([known.moves for _, known in plain])
    done = 0
    for block in _blocks(keys, lanes, lowest, highest):
        low = starts + block.seen
        first, end = np.searchsorted(marks, low), np.searchsorted(marks, low + block.counts * lanes)
        found = end - first
        mine = np.repeat(np.arange(len(classes)), found)
        at = np.arange(len(mine)) + np.repeat(first - np.cumsum(found) + found, found)
        yield _places(block, lanes, block.first[mine], marks[at] - low[mine]), moves[at]
        done += len(mine)
        for number, known in enumerate(classes):
            if known.inverted and block.counts[number]:
                ranks = _unlisted(known, int(block.seen[number]), int(block.counts[number]) * lanes)
                moved = known.moves[known.moves_done : known.moves_done + len(ranks)]
                if len(moved) != len(ranks):
                    raise BadDelta("a delta's frame has fewer moves than changes")
                known.moves_done += len(ranks)
                yield _places(block, lanes, block.first[number], ranks), moved
    inverted = [known for known in classes if known.inverted]
    if done != len(marks) or any(known.listed_done != len(known.listed) for known in inverted):
        raise BadDelta("a delta's frame names an element outside the base")
    if any(known.moves_done != known.changed for known in inverted):
        raise BadDelta("a delta's frame has more moves than changes")


def _places(block: _Block, lanes: int, first: Numbers | np.int64, ranks: Numbers) -> Numbers:
    """Where elements of a block are, by where their class begins in it and their number in that."""
    unit, lane = np.divmod(ranks, lanes) if lanes > 1 else (ranks, np.int64(0))
    place: Numbers = (block.dealt[first + unit] & np.uint32(SORTED_KEYS - 1)).astype(np.int64)
    return (place + block.start) * lanes + lane


def _unlisted(known: _Class, seen: int, count: int) -> Numbers:
    """Of a block's `count` elements of an inverted class those that are not listed."""
    end = known.listed_done + int(np.searchsorted(known.listed[known.listed_done :], seen + count))
    changed = np.ones(count, dtype=bool)
    changed[known.listed[known.listed_done : end] - seen] = False
    known.listed_done = end
    return np.flatnonzero(changed)


def _parse(payload: memoryview, elements: int, width: int) -> tuple[int, int, list[_Class]]:
    reader = Reader(payload)
    lowest, highest = reader.byte(), reader.byte()
    if lowest > highest:
        raise BadDelta(f"a delta's frame has classes from {lowest} to {highest}")
    limit = min(elements, CHANGES_MAX)
    classes = [_parse_class(reader, limit, width) for _ in range(highest - lowest + 1)]
    listed = [known.unchanged if known.inverted else known.changed for known in classes]
    changed = [known.changed for known in classes]
    sized = [known.changed if known.large else 0 for known in classes]
    if sum(listed) > limit or sum(changed) > limit:
        raise BadDelta(f"a delta's frame announces more than {limit} changes")
    unary = reader.take(reader.varint((elements + limit) // 8 + 1))  # gaps in a class add up to less than its elements
    high = _split(unpack_unary(unary, sum(listed)), listed)
    for known, count, gaps in zip(classes, listed, high, strict=True):
        if not known.changed:
            continue
        gaps = gaps << known.k | unpack_low(reader.take(low_bytes(count, known.k)), count, known.k)
        if gaps.max(initial=0) >= elements:  # and so their sum is nowhere near 64 bits
            raise BadDelta("a delta's frame names an element outside the base")
        known.listed = np.cumsum(gaps + 1) - 1
        if count and known.listed[-1] >= elements:
            raise BadDelta("a delta's frame names an element outside the base")
    signs = np.unpackbits(np.frombuffer(reader.take(-(-sum(changed) // 8)), dtype=np.uint8), count=sum(changed))
    unary = reader.take(reader.varint((ESCAPE + 1) * limit // 8 + 1))
    high = _split(unpack_unary(unary, sum(sized)), sized)
    escaped = []
    for known, count, sizes in zip(classes, sized, high, strict=True):
        known.moves = np.ones(known.changed, dtype=np.int64)
        if known.large:
            if sizes.max(initial=0) > ESCAPE:
                raise BadDelta("a delta's frame holds a size beyond the escape")
            known.moves += sizes << known.k_sizes
            known.moves += unpack_low(reader.take(low_bytes(count, known.k_sizes)), count, known.k_sizes)
            escaped.append((known.moves, np.flatnonzero(sizes == ESCAPE)))
    for moves, where in escaped:
        raw = np.zeros((len(where), 4), dtype=np.uint8)
        raw[:, :width] = np.frombuffer(reader.take(len(where) * width), dtype=np.uint8).reshape(-1, width)
        moves[where] = raw.view("<u4")[:, 0].astype(np.int64) + 1
    reader.end()
    for known, down in zip(classes, _split(signs, changed), strict=True):
        known.moves[down == 1] *= -1
    return lowest, highest, classes


def _parse_class(reader: Reader, limit: int, width: int) -> _Class:
    flags = reader.byte()
    if not flags:
        return _Class()
    if not flags & _PRESENT:
        raise BadDelta(f"a delta's frame has a class of the unknown kind {flags}")
    known = _Class(flags & _K, bool(flags & _INVERTED), bool(flags & _LARGE), reader.varint(limit))
    if not known.changed:
        raise BadDelta("a delta's frame has a class of no changes")
    if known.inverted:
        known.unchanged = reader.varint(limit)
    if known.large:
        known.k_sizes = reader.byte()
        if known.k_sizes >= 8 * width:
            raise BadDelta(f"a delta's frame has sizes of {known.k_sizes} low bits")
    return known


def _split(values: NDArray[np.generic], counts: list[int]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum(counts)[:-1])
