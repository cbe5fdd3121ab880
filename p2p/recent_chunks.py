"""Chunks that were verified just now, still in memory: whoever is fed from here mostly wants these very ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RECENT_BYTES_MAX = 32 << 20
"""Eight chunks of the largest size: a neighbour that is further behind is fed from the disk."""


class RecentChunks:
    """The newest chunks, `bytes_max` of them together."""

    def __init__(self, bytes_max: int = RECENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._chunks: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()

    def __len__(self) -> int:
        """How many."""
        return len(self._chunks)

    def keep(self, manifest_hash: bytes, index: int, data: bytes) -> None:
        """A verified chunk; the oldest go to make room for it."""
        self._bytes += len(data) - len(self._chunks.pop((manifest_hash, index), b""))
        self._chunks[manifest_hash, index] = data
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._chunks.popitem(last=False)[1])

    def get(self, manifest_hash: bytes, indices: Sequence[int]) -> list[bytes] | None:
        """All of these, or None when one of them is no longer here."""
        found = [self._chunks.get((manifest_hash, index)) for index in indices]
        return None if None in found else [data for data in found if data is not None]

    def drop(self, manifest_hash: bytes) -> None:
        """Forget what there is of this snapshot."""
        for key in [key for key in self._chunks if key[0] == manifest_hash]:
            self._bytes -= len(self._chunks.pop(key))
