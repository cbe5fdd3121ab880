"""The two-digit plus one-digit sums."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.tasks.arithmetic import Arithmetic
from echo2.tasks.task import Score

task = Arithmetic()


def texts(split):
    size = task.train_size if split == "train" else task.heldout_size
    return [task.prompt(split, i).text for i in range(size)]


def test_there_are_900_prompts_and_no_heldout_one_is_trained_on():
    """600 + 300 distinct prompts make up every sum there is."""
    train, heldout = texts("train"), texts("heldout")
    assert (len(train), len(heldout)) == (600, 300)
    assert set(train) | set(heldout) == {f"{a}+{b}=" for a in range(10, 100) for b in range(10)}


def test_the_split_does_not_move():
    """Hand-worked: 10+1 is held out (10 + 2 = 12 is divisible by 3), 10+0 is not."""
    assert task.prompt("train", 0).text == "10+0="
    assert task.prompt("heldout", 0).text == "10+1="
    assert task.prompt("heldout", 299).text == "99+9="


def test_heldout_prompts_are_spread_evenly_over_operands_and_answers():
    """Each addend 30 times, each tens digit 33 or 34 times, and every answer of the middle is trained on as well."""
    pairs = [tuple(map(int, text[:-1].split("+"))) for text in texts("heldout")]
    assert set(Counter(b for _, b in pairs).values()) == {30}
    assert set(Counter(a // 10 for a, _ in pairs).values()) <= {33, 34}
    assert set(Counter((a % 10, b) for a, b in pairs).values()) == {3}
    trained = {int(task.answer("train", i)) for i in range(task.train_size)}
    assert trained >= set(range(12, 108))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12", 1.0),
        (" 12\n", 1.0),
        ("", 0.0),
        ("13", 0.0),
        ("012", 0.0),
        ("12.", 0.0),
        ("12 12", 0.0),
        ("\u0661\u0662", 0.0),
    ],
)
def test_only_the_sum_itself_is_rewarded(response, reward):
    """Spaces around the digits are the only latitude."""
    index = texts("train").index("10+2=")
    assert task.score(task.prompt("train", index), response) == Score(reward)


@given(st.sampled_from(["train", "heldout"]), st.integers(0, 299))
def test_the_answer_is_the_sum_in_the_prompt(split, index):
    """What the prompt asks is what is rewarded."""
    prompt = task.prompt(split, index)
    a, b = map(int, prompt.text[:-1].split("+"))
    assert task.score(prompt, str(a + b)) == Score(1.0)


@pytest.mark.parametrize("index", [-1, 300, 10**9])
def test_an_index_outside_the_split_is_an_error(index):
    """A negative index does not count from the end."""
    with pytest.raises(IndexError):
        task.prompt("heldout", index)
