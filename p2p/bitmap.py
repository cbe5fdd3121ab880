"""Sets of chunk indices as integers: bit i stands for chunk i. Pure.

The largest snapshot has 262,144 chunks: 32 KiB so, against 16 MiB as a `set`, for each stream that asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def bits_of(indices: Iterable[int]) -> int:
    """The set of these (few) indices."""
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits


def below(count: int) -> int:
    """0 ... count - 1."""
    return (1 << count) - 1


def spread(bits: int, stride: int) -> int:
    """Each index times `stride`."""
    return bits if stride == 1 else int(("0" * (stride - 1)).join(f"{bits:b}"), 2)


def lowest(bits: int, count: int) -> list[int]:
    """The first `count` of them, or all when there are fewer, in order."""
    found: list[int] = []
    while bits and len(found) < count:
        last = bits & -bits
        found.append(last.bit_length() - 1)
        bits ^= last
    return found


def folded(bits: int, count: int, cells: int) -> int:
    """The first `count` indices in `cells` runs of nearly equal length: bit i is set when all of run i is.

    Run i goes from floor(i count / cells) to below floor((i + 1) count / cells). `cells` is at most `count`.
    """
    found = 0
    for cell in range(cells):
        start, stop = cell * count // cells, (cell + 1) * count // cells
        whole = below(stop - start)
        if bits >> start & whole == whole:
            found |= 1 << cell
    return found


def indices_in(bits: int) -> Iterator[int]:
    """All of them, in order."""
    for place, byte in enumerate(bits.to_bytes(-(-bits.bit_length() // 8), "little")):
        while byte:
            last = byte & -byte
            yield 8 * place + last.bit_length() - 1
            byte ^= last
