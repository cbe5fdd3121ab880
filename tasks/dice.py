"""Chance for sandboxes: numbers that follow from a seed alone, the same on every machine and in every Python.

Python's `random` promises the same sequence for few of its methods, and is easily shared by accident. This is BLAKE2b
in counter mode: word i of a stream is BLAKE2b-64(key = seed, purpose || 0x00 || le64(i)), read little-endian.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

_COUNTER = struct.Struct("<Q")
_WORDS = 1 << 64


class Dice:
    """One stream of words. Streams of one seed and different purposes are independent of each other."""

    def __init__(self, seed: bytes, purpose: str) -> None:
        self._state = blake2b(purpose.encode() + b"\0", key=seed, digest_size=8)
        self._next = 0

    def word(self) -> int:
        """The next word, 0 <= word < 2^64."""
        state = self._state.copy()
        state.update(_COUNTER.pack(self._next))
        self._next += 1
        return int.from_bytes(state.digest(), "little")

    def below(self, bound: int) -> int:
        """A number of 0 .. bound - 1, each as likely as any other. Raises ValueError for a bound outside 1 .. 2^64."""
        if not 1 <= bound <= _WORDS:
            raise ValueError(f"no number lies below {bound}")
        usable = _WORDS - _WORDS % bound  # what is above would favour small numbers
        while (word := self.word()) >= usable:
            pass
        return word % bound

    def happens(self, percent: int) -> bool:
        """True in `percent` of a hundred cases."""
        return self.below(100) < percent

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in an order of chance (Fisher-Yates, from the end)."""
        out = list(items)
        for last in range(len(out) - 1, 0, -1):
            other = self.below(last + 1)
            out[last], out[other] = out[other], out[last]
        return out
