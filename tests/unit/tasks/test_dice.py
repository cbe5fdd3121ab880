"""Chance that follows from a seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.tasks.dice import Dice

SEED = bytes(range(32))
WORD_0, WORD_1, WORD_2 = 0xB63E316FFB2B38DC, 0xF024AEEB344DD33C, 0x28AEC40C61A20AB0


def test_the_stream_is_pinned():
    """The first words of one seed and purpose: a change here would change every episode ever played."""
    dice = Dice(SEED, "deal")
    assert [dice.word() for _ in range(3)] == [WORD_0, WORD_1, WORD_2]
    assert Dice(SEED, "other").word() != WORD_0


def test_a_word_is_the_keyed_hash_of_purpose_and_counter():
    """BLAKE2b-64 of the purpose, a zero byte and the counter, keyed with the seed."""
    from hashlib import blake2b

    digest = blake2b(b"deal\0" + (1).to_bytes(8, "little"), key=SEED, digest_size=8).digest()
    assert int.from_bytes(digest, "little") == WORD_1


@given(st.binary(min_size=32, max_size=32), st.integers(1, 1000))
def test_a_number_lies_below_its_bound(seed, bound):
    """Whatever the bound."""
    dice = Dice(seed, "x")
    assert all(0 <= dice.below(bound) < bound for _ in range(5))


def test_every_number_below_a_bound_comes_about_equally_often():
    """6000 throws of a die: each face 1000 times, within five standard deviations (29)."""
    dice = Dice(SEED, "die")
    throws = [dice.below(6) for _ in range(6000)]
    assert all(abs(throws.count(face) - 1000) < 145 for face in range(6))


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(), max_size=60))
def test_a_shuffle_keeps_every_item(seed, items):
    """And is the same for the same seed."""
    shuffled = Dice(seed, "x").shuffled(items)
    assert sorted(shuffled) == sorted(items)
    assert shuffled == Dice(seed, "x").shuffled(items)


@pytest.mark.parametrize("bound", [0, -1, 2**64 + 1])
def test_there_is_nothing_below_a_senseless_bound(bound):
    """A defect of the caller, said at once."""
    with pytest.raises(ValueError, match="no number"):
        Dice(SEED, "x").below(bound)
