"""Which process evaluates which rows of a minibatch, so that all are done at about the same time. Pure, numpy.

Every process knows the whole batch and so everybody's share: nothing is negotiated. Gathering a layer's weights takes
all processes, so all make the same number of passes; who has nothing left passes a few tokens that do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from .packing import Pack


class Crew(Protocol):
    """The processes that train together, as a training step sees them: `ranks.Ranks`, or `Alone`."""

    @property
    def rank(self) -> int:
        """This one's number, from 0."""

    @property
    def size(self) -> int:
        """How many they are."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all of them, the same in each. All must ask, with the same shape."""


class Alone:
    """The crew of a learner of one process."""

    rank = 0
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        """Itself."""
        return values


def split_rows(
    mask: NDArray[np.bool_], group: NDArray[np.int64], rows: NDArray[np.int64], parts: int
) -> list[NDArray[np.int64]]:
    """These rows in `parts` shares of about equal length in tokens, each share neighbours in the order of the groups.

    mask bool [B, T] true where a token was sampled, group int64 [B]. A group lies in one share, or at a border in two:
    rollouts that share a prompt are cheap together. Shares may be empty.
    """
    if parts == 1:
        return [rows]
    ordered = rows[np.argsort(group[rows], kind="stable")]
    columns = mask.shape[1]
    width = np.where(mask[ordered].any(axis=1), columns - np.argmax(mask[ordered][:, ::-1], axis=1), 0)
    middle = np.cumsum(width) - width / 2
    share = np.minimum((middle * parts / max(1, width.sum())).astype(np.int64), parts - 1)
    return [ordered[share == part] for part in range(parts)]


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of all processes: each one's pack, or None when it passes `filler`, which does not count."""

    packs: tuple[Pack | None, ...]
    filler: Pack

    def of(self, rank: int) -> tuple[Pack, bool]:
        """What a process passes, and whether it counts."""
        pack = self.packs[rank]
        return (self.filler, False) if pack is None else (pack, True)

    @property
    def rows(self) -> NDArray[np.int64]:
        """All rows that are evaluated in it, by whichever process."""
        return np.unique(np.concatenate([pack.rows for pack in self.packs if pack is not None]))


def rounds_of(shares: Sequence[Iterable[Pack]]) -> list[Round]:
    """As many rounds as the longest share has packs; the filler is the smallest pack of all."""
    packed = [list(share) for share in shares]
    every = [pack for share in packed for pack in share]
    if not every:
        return []
    filler = min(every, key=lambda pack: len(pack.tokens))
    return [Round(packs, filler) for packs in zip_longest(*packed)]
