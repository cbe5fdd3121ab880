"""Who evaluates what: every row once, shares about equal, as many rounds for each."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.learner.packing import packs
from echo2.learner.shares import Alone, rounds_of, split_rows


def arrays(lengths, group):
    mask = np.zeros((len(lengths), max(lengths) + 1), bool)
    for row, length in enumerate(lengths):
        mask[row, 1 : length + 1] = True
    return mask, np.asarray(group, np.int64)


def test_shares_worked_by_hand():
    """Two groups of equal length go to a process each; one long row outweighs three short ones."""
    mask, group = arrays([3, 3, 3, 3], [0, 0, 1, 1])
    assert [share.tolist() for share in split_rows(mask, group, np.arange(4), 2)] == [[0, 1], [2, 3]]
    mask, group = arrays([9, 2, 2, 2], [0, 1, 1, 1])
    assert [share.tolist() for share in split_rows(mask, group, np.arange(4), 2)] == [[0], [1, 2, 3]]


def test_alone_the_rows_are_as_they_come():
    """One process has nothing to share, and its order is the caller's."""
    mask, group = arrays([3, 3, 3], [0, 0, 1])
    (share,) = split_rows(mask, group, np.array([2, 0]), 1)
    assert share.tolist() == [2, 0]
    assert Alone().sum(torch.tensor(3.0)) == 3.0


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(2, 9),
    st.randoms(use_true_random=False),
)
def test_every_row_is_evaluated_once_and_no_share_is_far_above_its_part(lengths, parts, rng):
    """A share is at most its part of the tokens and one row more."""
    mask, group = arrays(lengths, sorted(rng.randrange(5) for _ in lengths))
    rows = np.array(rng.sample(range(len(lengths)), rng.randint(1, len(lengths))))
    shares = split_rows(mask, group, rows, parts)
    assert len(shares) == parts
    assert sorted(np.concatenate(shares).tolist()) == sorted(rows.tolist())
    width = np.asarray(lengths) + 1
    for share in shares:
        assert width[share].sum() <= width[rows].sum() / parts + width[rows].max()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(2, 5), st.integers(10, 30))
def test_all_make_the_same_number_of_passes(lengths, parts, tokens_max):
    """Each pack counts once, in its own process; who has none left passes the smallest, which does not count."""
    mask, group = arrays(lengths, range(len(lengths)))
    tokens = np.zeros(mask.shape, np.int64)
    shares = split_rows(mask, group, np.arange(len(lengths)), parts)
    rounds = rounds_of([packs(tokens, mask, group, share, tokens_max=tokens_max) for share in shares])
    seen = []
    for turn in rounds:
        for rank in range(parts):
            pack, counts = turn.of(rank)
            assert counts or len(pack.tokens) == len(turn.filler.tokens)
            if counts:
                assert set(pack.rows) <= set(shares[rank].tolist())
                assert set(pack.rows) <= set(turn.rows.tolist())
                seen += sorted(set(pack.rows.tolist()))
    assert sorted(seen) == list(range(len(lengths)))


def test_nothing_to_evaluate_is_no_round():
    """A minibatch that teaches nothing takes no pass at all, in any process."""
    assert rounds_of([[], []]) == []
