"""The race to a number."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.tasks.race import LOST_REWARD, Race

SEED = bytes(range(32))


def sum_of(text):
    before, step = map(int, re.fullmatch(r"([0-9]{2})\+([123])=", text).groups())
    return before + step


def perfect(total, target=29):
    """Leave a multiple of 4; where that is impossible, add 1."""
    step = (target - total) % 4
    return total + (step or 1)


@given(st.binary(min_size=32, max_size=32))
def test_a_perfect_player_keeps_to_the_rules_and_mostly_wins(seed):
    """From every start: never a broken rule, at most five turns, and a win from each position that is not lost."""
    game = Race().sandbox()
    said = game.reset(seed)
    lost_position = (29 - sum_of(said.text)) % 4 == 0
    turns = 0
    while not said.done:
        turns += 1
        said = game.step(str(perfect(sum_of(said.text))))
    assert said.details["rules_broken"] == 0
    assert turns <= Race.turns_max
    assert said.reward in {1.0, LOST_REWARD}
    assert lost_position or said.reward == 1.0


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_an_episode_replays_identically(seed, steps):
    """Same seed, same actions, same texts and rewards."""

    def once():
        game = Race().sandbox()
        said = [game.reset(seed)]
        for step in steps:
            if not said[-1].done:
                said.append(game.step(str(sum_of(said[-1].text) + step)))
        return [(each.text, each.reward, dict(each.details)) for each in said]

    assert once() == once()


@pytest.mark.parametrize("action", ["", "no", "0", "99", "1000000", "29 or 5", "-1", "٢٩"])
def test_what_breaks_the_rules_earns_nothing(action):
    """No number, one that is not 1 to 3 above the total, or one beyond the target."""
    game = Race().sandbox()
    game.reset(SEED)
    end = game.step(action)
    assert (end.done, end.reward, end.details["rules_broken"]) == (True, 0.0, 1.0)
    with pytest.raises(ValueError, match="over"):
        game.step("1")


def test_an_episode_cut_off_earns_nothing():
    """Saying nothing is against the rules."""
    game = Race().sandbox()
    game.reset(SEED)
    end = game.truncate()
    assert (end.done, end.reward) == (True, 0.0)


def test_the_last_number_counts():
    """A model may show its work."""
    one, other = Race().sandbox(), Race().sandbox()
    total = sum_of(one.reset(SEED).text)
    other.reset(SEED)
    assert one.step(str(total + 1)) == other.step(f"{total} + 1 = {total + 1}")


def test_in_words_the_rules_are_told_once():
    """For models that read: rules in the opening, the state in every observation."""
    game = Race(language="words").sandbox()
    opening = game.reset(SEED).text
    assert "who says 29 wins" in opening
    assert re.search(r"The total was \d+ and I add \d\. Which total do you say\?$", opening)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"target": 100}, "target"), ({"language": "latin"}, "language"), ({"train_size": 0}, "train_size")],
)
def test_options_out_of_bounds_are_refused(options, why):
    """With words for the person who set them."""
    with pytest.raises(ValueError, match=why):
        Race(**options)
