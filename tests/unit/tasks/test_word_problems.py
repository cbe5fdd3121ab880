"""The word problems, and finding the number in an answer."""

from __future__ import annotations

from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.tasks.task import Score
from echo2.tasks.word_problems import WordProblems, last_number

task = WordProblems()


def test_all_prompts_are_distinct_and_the_splits_do_not_meet():
    """1280 problems, one in four held out."""
    train = {task.prompt("train", i).text for i in range(task.train_size)}
    heldout = {task.prompt("heldout", i).text for i in range(task.heldout_size)}
    assert len(train) == task.train_size
    assert len(heldout) == task.heldout_size
    assert not train & heldout
    assert len(train) + len(heldout) == 1280
    assert len(heldout) == 320


def test_the_problems_and_their_answers_do_not_move():
    """Hand-worked: 10 + 3 b is held out where it is a multiple of four, so 10 and 2 are, and 10 and 3 are not."""
    prompt = task.prompt("train", 0)
    assert prompt.text == "Chen has 10 coins and buys 3 more. How many coins does Chen have?"
    assert prompt.prefill == "10 + 3 ="
    assert task.answer("train", 0) == "13"
    assert task.prompt("heldout", 0).prefill == "10 + 2 ="


@pytest.mark.parametrize("index", range(0, 960, 40))
def test_no_answer_is_negative_or_zero(index):
    """Every problem describes something that can happen."""
    assert int(task.answer("train", index)) > 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("19", "19"),
        ("The answer is 19.", "19"),
        ("12 + 7 = 19 apples", "19"),
        ("First 12, then 19", "19"),
        ("019", "19"),
        ("19.0", "19"),
        ("$19.50", "19.5"),
        ("1,234", "1234"),
        ("1,23", "23"),
        ("about -19", "-19"),
        ("\u221219", "-19"),
        ("12-5", "5"),
        ("(12)-5", "5"),
        ("x = -0.00", "0"),
        ("-0", "0"),
        ("0.50", "0.5"),
        ("**19**", "19"),
        ("nineteen", None),
        ("", None),
        ("\u0661\u0669", None),
        ("7" + " " * 5000, None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    """Units, full stops, grouping commas and working before the answer do not matter; other scripts do not count."""
    assert last_number(text) == number


@given(st.text())
def test_any_text_is_scored_zero_or_one(text):
    """No response makes the scorer raise."""
    assert task.score(task.prompt("train", 5), text).reward in (0.0, 1.0)


@pytest.mark.parametrize("piece", ["9", "1,111", ",111", "1.", "-", "9,", "-1,1"])
def test_a_long_hostile_text_takes_no_time(piece):
    """The worst repetition of a million characters costs milliseconds, not minutes."""
    started = perf_counter()
    task.score(task.prompt("train", 5), piece * 1_000_000)
    assert perf_counter() - started < 0.5


@given(st.integers(0, task.heldout_size - 1))
def test_the_right_number_in_a_sentence_earns_the_reward(index):
    """Models answer in sentences."""
    prompt = task.prompt("heldout", index)
    answer = task.answer("heldout", index)
    assert task.score(prompt, f"Let me think. 1 + 1 = 2, so it is {answer}.") == Score(1.0)
    assert task.score(prompt, f"{answer}1") == Score(0.0)
