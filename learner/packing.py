"""Which rollouts are evaluated together, and how they lie in one row without a padding token. Pure, numpy.

What rollouts of one group have in common (their prompt, as a rule) is their stem; what each has of its own is its
branch. A stem attends to itself, a branch to its stem and itself. So a prompt is computed once for all its samples in
the micro-batch, and the gradients of all of them meet in it.

The token at column c of a rollout is predicted by the hidden state at c - 1. So the last token need not be computed,
and the state at the end of a stem predicts the first token of every branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch: N tokens in one row, M sampled tokens to be scored.

    tokens and positions int64 [N]. The row is segments of `lengths` tokens, a stem before its branches: `alone` says of
    each whether it attends to itself only, or also to the last segment before it that does. `source` int64 [M] is where
    in the row the hidden state lies that predicts a sampled token, `rows` and `columns` int64 [M] where that token
    stands in the batch's arrays. Ordered by row, then column.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: tuple[int, ...]
    alone: tuple[bool, ...]
    source: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Family:
    """Rollouts that share their first `stem` tokens; `widths` is how many tokens of each are computed."""

    rows: NDArray[np.int64]
    widths: NDArray[np.int64]
    stem: int


def packs(
    tokens: NDArray[np.int64],
    mask: NDArray[np.bool_],
    group: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    tokens_max: int,
) -> Iterator[Pack]:
    """These rows in micro-batches of at most `tokens_max` computed tokens; a rollout that is longer makes its own.

    tokens int64 [B, T] padded on the right, mask bool [B, T] true where a token was sampled (never in column 0), group
    int64 [B]: rollouts of one group are packed together. Rows in which nothing was sampled are left out.
    """
    pending: list[_Family] = []
    used = 0
    for family in _families(tokens, mask, group, rows):
        first = 0
        branches = family.widths - family.stem
        cost = family.stem
        for index, branch in enumerate(branches):
            if used + cost + branch > tokens_max and (pending or index > first):
                if index > first:
                    pending.append(_part(family, first, index))
                yield _pack(tokens, mask, pending)
                pending, used, first, cost = [], 0, index, family.stem
            cost += int(branch)
        pending.append(_part(family, first, len(branches)))
        used += cost
    if pending:
        yield _pack(tokens, mask, pending)


def _families(
    tokens: NDArray[np.int64], mask: NDArray[np.bool_], group: NDArray[np.int64], rows: NDArray[np.int64]
) -> Iterator[_Family]:
    width = np.where(mask.any(axis=1), mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1), 0)
    rows = rows[width[rows] > 0]
    for label in np.unique(group[rows]):
        members = rows[group[rows] == label]
        shortest = int(width[members].min())
        same = (tokens[members, :shortest] == tokens[members[0], :shortest]).all(axis=0)
        stem = shortest if same.all() else int(np.argmin(same))
        yield _Family(members, width[members], stem)


def _part(family: _Family, first: int, stop: int) -> _Family:
    return _Family(family.rows[first:stop], family.widths[first:stop], family.stem)


def _pack(tokens: NDArray[np.int64], mask: NDArray[np.bool_], families: Sequence[_Family]) -> Pack:
    flat: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    alone: list[bool] = []
    places: dict[int, NDArray[np.int64]] = {}
    end = 0

    def lay(row: int, first: int, stop: int, *, by_itself: bool) -> NDArray[np.int64]:
        nonlocal end
        flat.append(tokens[row, first:stop])
        positions.append(np.arange(first, stop))
        alone.append(by_itself)
        end += stop - first
        return np.arange(end - (stop - first), end)

    for family in families:
        rows, stem = family.rows.tolist(), np.arange(0)
        if family.stem:
            stem = lay(rows[0], 0, family.stem, by_itself=True)
        for row, width in zip(rows, family.widths.tolist(), strict=True):
            places[row] = stem
            if width > family.stem:
                branch = lay(row, family.stem, width, by_itself=not family.stem)
                places[row] = np.concatenate([stem, branch])
    order = sorted(places)
    columns = [np.flatnonzero(mask[row]) for row in order]
    return Pack(
        tokens=np.concatenate(flat),
        positions=np.concatenate(positions),
        lengths=tuple(map(len, flat)),
        alone=tuple(alone),
        source=np.concatenate([places[row][at - 1] for row, at in zip(order, columns, strict=True)]),
        rows=np.repeat(order, [len(at) for at in columns]),
        columns=np.concatenate(columns),
    )
