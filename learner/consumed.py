"""The set of consumed samples: exact, and as small as training is orderly. Pure.

Groups are consumed once and nearly in order, nearly always whole, so runs of neighbouring groups with the same samples
are kept as one entry: a run of a million groups without a gap is a single triple.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ConsumedSet:
    """Maps each consumed group to the bit mask of its consumed samples. A group is added once."""

    def __init__(self, runs: Iterable[tuple[int, int, int]] = ()) -> None:
        self._runs = sorted(runs)
        ends = [0, *(stop for _, stop, _ in self._runs)]
        if any(
            not (end <= first < stop and mask > 0) for end, (first, stop, mask) in zip(ends, self._runs, strict=False)
        ):
            raise ValueError("the runs of a consumed set are not empty, do not overlap and name at least one sample")

    def __contains__(self, ordinal: int) -> bool:
        return self.mask(ordinal) != 0

    def mask(self, ordinal: int) -> int:
        """Bit i is set when sample i of the group was consumed; 0 for a group that was not."""
        position = bisect_right(self._runs, ordinal, key=lambda run: run[0]) - 1
        if position >= 0:
            _, stop, mask = self._runs[position]
            if ordinal < stop:
                return mask
        return 0

    def add(self, ordinal: int, mask: int) -> None:
        """Record a group. Raises ValueError when it was consumed before: nothing may be trained on twice."""
        if mask <= 0 or ordinal in self:
            raise ValueError(f"group {ordinal} was consumed before, or no sample of it is named")
        position = bisect_right(self._runs, ordinal, key=lambda run: run[0])
        first, stop = ordinal, ordinal + 1
        if position < len(self._runs) and self._runs[position][0] == stop and self._runs[position][2] == mask:
            stop = self._runs.pop(position)[1]
        if position > 0 and self._runs[position - 1][1] == first and self._runs[position - 1][2] == mask:
            position -= 1
            first = self._runs.pop(position)[0]
        self._runs.insert(position, (first, stop, mask))

    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first, stop, mask) in order, as short as it gets."""
        return tuple(self._runs)

    def unbroken(self) -> int:
        """The least ordinal of which nothing was consumed."""
        ordinal = 0
        for first, stop, _ in self._runs:
            if first != ordinal:
                break
            ordinal = stop
        return ordinal

    def count(self) -> int:
        """Consumed rollouts."""
        return sum((stop - first) * mask.bit_count() for first, stop, mask in self._runs)
