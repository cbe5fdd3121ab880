"""Which prompt a training ordinal means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.tasks.curriculum import train_index


@given(seed=st.integers(), sweep=st.integers(0, 1000), size=st.integers(1, 300))
def test_each_pass_visits_every_index_once(seed, sweep, size):
    """No prompt is skipped or repeated within a pass, whatever the seed and the size."""
    assert sorted(train_index(seed, sweep * size + i, size) for i in range(size)) == list(range(size))


def test_passes_and_seeds_differ():
    """A second pass is not the first again, nor is another seed's."""

    def order(seed, sweep):
        return [train_index(seed, sweep * 600 + i, 600) for i in range(600)]

    orders = [order(1, 0), order(1, 1), order(2, 0), list(range(600))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_the_order_does_not_move():
    """A resumed run meets the same prompts: these values may never change within a major version."""
    assert [train_index(7, i, 600) for i in range(6)] == [200, 421, 275, 391, 255, 132]


def test_a_pass_is_well_mixed():
    """The first half of a pass over 600 holds about half of the low indices (hypergeometric: 150 +- 6)."""
    low = sum(train_index(0, i, 600) < 300 for i in range(300))
    assert 120 <= low <= 180


@pytest.mark.parametrize(("ordinal", "size"), [(-1, 10), (0, 0), (0, -1)])
def test_a_negative_ordinal_or_an_empty_set_is_an_error(ordinal, size):
    """Rather than a prompt nobody meant."""
    with pytest.raises(ValueError, match="no training prompt"):
        train_index(0, ordinal, size)
