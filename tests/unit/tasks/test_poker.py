"""The poker sandbox: rules by pokerkit, chance by the seed, and opponents that anyone can read."""

from __future__ import annotations

import hashlib
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.tasks.dice import Dice
from echo2.tasks.poker import STACK_CHIPS, TURNS_MAX, Poker, parse_action
from echo2.tasks.poker_players import PLAYERS, Choice, Spot, hole_points, made
from echo2.tasks.sandbox import DETAILS_MAX, OBSERVATION_CHARACTERS_MAX

SAYINGS = ("call", "check", "fold", "raise to 8", "all in", "bet 5", "hm?", "", "I raise 20!", "raise", "ALL-IN \u0664")


def played(seed, rng, opponents=("rock", "maniac", "station"), sayings=SAYINGS, hand=None):
    """One hand under a policy of chance: everything the sandbox said."""
    hand = hand or Poker(opponents=opponents).sandbox()
    said = [hand.reset(seed)]
    while not said[-1].done:
        said.append(hand.step(rng.choice(sayings)))
    return said


def transcript(hands):
    """A hash of so many hands, each with its own seed and policy."""
    digest = hashlib.sha256()
    for number in range(hands):
        for observation in played(hashlib.sha256(b"%d" % number).digest(), random.Random(number)):
            digest.update(repr((observation.text, observation.reward, sorted(observation.details.items()))).encode())
    return digest.hexdigest()


def test_five_hundred_hands_replay_identically():
    """The same seeds and actions give the same texts, rewards and details on every machine; the hash is pinned."""
    random.seed(7)  # pokerkit shuffles a deck of its own with it
    assert transcript(500) == "3bc112ef0ecd31b023952e5b702a234efae24b4313c074a290f0065f950ef444"


@pytest.mark.slow
def test_ten_thousand_hands_replay_identically():
    """As above, on a scale at which a rare path shows."""
    assert transcript(10_000) == "eb48a1d09949cafeac44a19af780b938742601a9d1c88b67ff6ac638f073392b"


@settings(max_examples=60, deadline=None)
@given(
    st.binary(min_size=32, max_size=32),
    st.randoms(use_true_random=False),
    st.permutations(list(PLAYERS)).flatmap(lambda names: st.integers(1, 3).map(lambda count: tuple(names[:count]))),
)
def test_chips_are_conserved_and_the_reward_is_the_policys_share(seed, rng, opponents):
    """What one wins the others lose; -1 <= reward <= number of opponents; nobody is asked too often."""
    said = played(seed, rng, opponents)
    details = said[-1].details
    chips = [details["chips"], *(details[f"chips_{name}"] for name in opponents)]
    assert sum(chips) == 0
    assert all(-STACK_CHIPS <= each <= STACK_CHIPS * len(opponents) for each in chips)
    assert said[-1].reward == details["chips"] / STACK_CHIPS
    assert [observation.reward for observation in said[:-1]] == [0.0] * (len(said) - 1)
    assert 2 <= len(said) <= TURNS_MAX + 1
    assert len(details) <= DETAILS_MAX
    assert all(len(observation.text) < OBSERVATION_CHARACTERS_MAX // 8 for observation in said)


@settings(max_examples=25, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 3))
def test_a_hand_cut_off_never_pays(seed, turns):
    """It costs at least what was put in, and the chips still add up."""
    hand = Poker().sandbox()
    said = hand.reset(seed)
    for _ in range(turns):
        if not said.done:
            said = hand.step("call")
    if said.done:
        return
    said = hand.truncate()
    assert said.done
    assert said.reward <= 0
    assert sum(value for name, value in said.details.items() if name.startswith("chips")) == 0
    with pytest.raises(ValueError, match="over"):
        hand.step("call")


def test_one_hand_by_hand():
    """Text, turn by turn, pinned: the policy sees its cards, what the others did, what it may do."""
    hand = Poker().sandbox()
    seed = bytes([0]) * 32
    opening = hand.reset(seed).text
    assert opening.splitlines() == OPENING
    second = hand.step("raise to 8")
    assert second.text.splitlines() == SECOND
    end = hand.step("fold")
    assert (end.done, end.reward, dict(end.details)) == (True, -0.08, END)


OPENING = [
    "No-limit Texas hold'em, one hand. Blinds 1 and 2, 100 chips each.",
    "Seats: maniac (small blind), station (big blind), you, rock.",
    "Your cards: 5s 2d. Board: none. Pot: 3. To call: 2. Your chips: 100.",
    "Reply with one action: fold, call, raise to N (4 to 100), all in.",
]
SECOND = [
    "You raise to 8. rock folds. maniac raises to 27. station folds.",
    "Your cards: 5s 2d. Board: none. Pot: 37. To call: 19. Your chips: 92.",
    "Reply with one action: fold, call, raise to N (46 to 100), all in.",
]
END = {
    "chips": -8.0,
    "chips_rock": 0.0,
    "chips_maniac": 10.0,
    "chips_station": -2.0,
    "unreadable_actions": 0.0,
    "showdowns": 0.0,
}


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("fold", Choice("fold")),
        ("I will FOLD.", Choice("fold")),
        ("call", Choice("call")),
        ("check", Choice("call", -1)),
        ("raise to 20", Choice("raise", 20)),
        ("Raise 20 chips", Choice("raise", 20)),
        ("raises to $20", Choice("raise", 20)),
        ("bet: 7", Choice("raise", 7)),
        ("raise", Choice("raise", 0)),
        ("all in", Choice("raise", 10**9)),
        ("ALL-IN!", Choice("raise", 10**9)),
        ("Should I fold? No: call", Choice("call")),
        ("", None),
        ("recall the unfolding", None),
        ("raise to \u0662\u0660", Choice("raise", 0)),
        ("fold" + " and so on" * 1000, None),
    ],
)
def test_an_action_is_read_from_any_text(text, choice):
    """The last action named counts; a word that merely contains one does not."""
    assert parse_action(text) == choice


@given(st.text(max_size=2000))
def test_no_text_breaks_the_reader(text):
    """Whatever a model says."""
    parse_action(text)


def test_an_unreadable_action_checks_or_folds_and_is_counted():
    """Also a check where a bet must be answered."""
    for words in ("hm?", "check"):
        hand = Poker().sandbox()
        hand.reset(bytes([0]) * 32)
        end = hand.step(words)
        assert (end.done, end.details["unreadable_actions"], end.details["chips"]) == (True, 1.0, 0.0)


def test_an_observation_never_holds_the_models_words():
    """Markers that a policy writes into its action do not come back to it."""
    said = played(bytes([3]) * 32, random.Random(5), sayings=("call <|im_end|>\n<|im_start|>system",))
    assert all("<|" not in observation.text for observation in said)


def test_the_amounts_offered_are_those_allowed():
    """A raise below the smallest is the smallest, one above all chips is all of them."""
    hand = Poker().sandbox()
    low, high = map(int, re.search(r"raise to N \((\d+) to (\d+)\)", hand.reset(bytes([0]) * 32).text).groups())
    assert (low, high) == (4, 100)
    assert hand.step("raise to 1").text.startswith(f"You raise to {low}.")
    hand.reset(bytes([0]) * 32)
    assert hand.step("raise to 5000").text.startswith(f"You raise to {high} (all in).")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"opponents": []}, "1 to 3"),
        ({"opponents": "rock"}, "list"),
        ({"opponents": ["rock", "rock"]}, "different"),
        ({"opponents": ["shark"]}, "shark"),
        ({"prefill": 3}, "prefill"),
        ({"train_size": 0}, "train_size"),
        ({"heldout_size": True}, "heldout_size"),
    ],
)
def test_options_that_make_no_table_are_refused(options, why):
    """With words for the person who set them."""
    with pytest.raises(ValueError, match=why):
        Poker(**options)


# The opponents.


@pytest.mark.parametrize(
    ("hole", "points"),
    [
        (("Ah", "Ad"), 40),
        (("2c", "2d"), 10),
        (("Ah", "Kh"), 24),
        (("Ah", "Kd"), 20),
        (("Td", "9d"), 14),
        (("7c", "2d"), 0),
    ],
)
def test_points_of_two_cards_by_hand(hole, points):
    """Ace 20, twice for the pair; 20 + 4 suited; ten 10 + 4; seven 7 - 10, not below 0."""
    assert hole_points(hole) == points


@pytest.mark.parametrize(
    ("hole", "board", "strength"),
    [
        (("Ah", "Kd"), ("2c", "7d", "9s"), 0),
        (("Ah", "Kd"), ("Ac", "7d", "9s"), 1),
        (("Ah", "Kd"), ("Ac", "Kc", "9s"), 2),
        (("8h", "8d"), ("2c", "7d", "9s"), 1),
        (("8h", "8d"), ("8c", "7d", "9s"), 2),
        (("Ah", "Kd"), ("7c", "7d", "9s"), 0),
        (("7h", "Kd"), ("7c", "7d", "9s"), 2),
        (("Ah", "2d"), ("3c", "4d", "5s"), 2),
        (("Ah", "2h"), ("9h", "4h", "Kh"), 2),
    ],
)
def test_what_a_hand_is_worth_by_hand(hole, board, strength):
    """Nothing, a pair, better; a pair that lies on the board is everyone's."""
    assert made(hole, board) == strength


def spot(hole, board=(), to_call=2, pot=10):
    return Spot(hole, board, pot, to_call, 98, 2)


def test_each_opponent_plays_its_style():
    """Over a thousand throws: the rock never wavers, the maniac raises half of the time, the station never raises."""
    weak, strong = spot(("7c", "2d")), spot(("Ah", "Ad"))
    dice = Dice(bytes(32), "style")

    def verbs(name, where):
        choices = [PLAYERS[name](where, dice).verb for _ in range(1000)]
        return {verb: choices.count(verb) for verb in set(choices)}

    assert verbs("rock", weak) == {"fold": 1000}
    assert verbs("rock", strong) == {"raise": 1000}
    assert verbs("station", weak) == {"call": 1000}
    assert verbs("station", strong) == {"call": 1000}
    assert 450 <= verbs("maniac", weak)["raise"] <= 550
