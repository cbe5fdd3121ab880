"""Sets of chunk indices as integers, against Python's own sets."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.bitmap import below, bits_of, folded, indices_in, lowest, spread
from echo2.p2p.messages import CHUNKS_MAX

INDICES = st.sets(st.integers(0, 300))


@given(INDICES)
def test_a_set_comes_back_in_order(wanted):
    """What is put in is what comes out, lowest first."""
    assert list(indices_in(bits_of(wanted))) == sorted(wanted)


@given(INDICES, st.integers(0, 20))
def test_the_lowest_few(wanted, count):
    """The first of them, no more than asked for and no more than there are."""
    assert lowest(bits_of(wanted), count) == sorted(wanted)[:count]


@given(INDICES, st.integers(1, 7))
def test_spread_multiplies_each_index(wanted, stride):
    """Index i of a sequence is index i * stride of what it is taken from."""
    assert set(indices_in(spread(bits_of(wanted), stride))) == {index * stride for index in wanted}


@given(st.integers(1, 600), st.integers(1, 256), st.data())
def test_a_folded_cell_is_set_when_all_of_its_run_is(count, cells, data):
    """The runs cover every index once, in order; a cell with one index missing is not set."""
    cells = min(cells, count)
    missing = data.draw(st.sets(st.integers(0, count - 1), max_size=8))
    cell_of = {
        index: cell for cell in range(cells) for index in range(cell * count // cells, (cell + 1) * count // cells)
    }
    assert sorted(cell_of) == list(range(count))
    kept = below(count) & ~bits_of(missing)
    assert set(indices_in(folded(kept, count, cells))) == set(range(cells)) - {cell_of[index] for index in missing}


def test_by_hand():
    """0, 2 and 3 are 0b1101; all below 4 are 0b1111."""
    assert (bits_of([3, 0, 2]), below(4), below(0)) == (0b1101, 0b1111, 0)


def test_every_chunk_there_can_be_is_small():
    """The set of all chunks of the largest snapshot takes about 32 KiB."""
    assert sys.getsizeof(below(CHUNKS_MAX)) < 36 * 1024
