"""The forms of answers: what is read in each, and what is not in it. Texts only, no symbolic algebra system."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.tasks.math_answers import last_answer, written
from echo2.tasks.math_forms import FORMS, read, same
from echo2.tasks.math_recipe import problems

RIGHT = {
    ("fraction", r"-\frac{1}{10}"): [
        r"\frac{-1}{10}",
        "-1/10",
        r"-\dfrac1{10}",
        r"-\left(\frac{1}{10}\right)",
        "\u22121/10",
    ],
    ("fraction", r"\frac{16}{21}"): [
        "16/21",
        r"\frac{8}{6} - \frac{4}{7} = \frac{16}{21}",
        r"\displaystyle\tfrac{16}{21}.",
    ],
    ("number", "270"): [
        "270 dollars",
        r"\$270",
        "270.00",
        r"270\text{ dollars}",
        "270 km/h",
        r"\mathrm{270}",
        "x = 270",
    ],
    ("number", "1110"): ["1,110", r"1{,}110", r"1\,110"],
    ("number", r"\frac{9}{4}"): [
        "2.25",
        r"2\frac{1}{4}",
        "2 1/4",
        "18/8",
        r"\frac94 \text{ hours}",
        "2.25 h",
        r"225\%",
    ],
    ("number", "x = -22"): ["-22", "x=-22", r"x = -\frac{44}{2}"],
    ("simplest root", r"10\sqrt{13}"): [r"10 \cdot \sqrt{13}", "10\u221a13", "10*sqrt(13)", r"10\sqrt13"],
    ("root", r"\frac{2\sqrt{11}}{11}"): [r"\frac{2}{11}\sqrt{11}", r"2\sqrt{11}/11", r"\frac{4\sqrt{11}}{22}"],
    ("root", r"5\sqrt{2}"): [r"\sqrt{50}", r"d = 5\sqrt{2}", r"5\sqrt{2}\text{ units}"],
    ("polynomial", "2x^2 - 18"): ["-18 + 2x^{2}", r"2 \cdot x^2 - 18", "2x\u00b2-18", "f'(x) = 2x^2 - 18", "2*x**2-18"],
    ("polynomial", "y = -4x - 3"): ["-4x-3", "y = -3 - 4x"],
    ("set", r"\{-3, 4\}"): [r"\left\{4, -3\right\}", "-3 and 4", r"x = -3 \text{ or } x = 4", r"A \cup B = \{-3,4\}"],
    ("set", r"\{-3, 3\}"): [r"\pm 3", r"x = \pm 3", "x_1 = 3, x_2 = -3"],
    ("pair", "(1, -2)"): ["(x, y) = (1, -2)", "x = 1, y = -2", r"x = 1 \text{ and } y = -2", r"\left(1,\,-2\right)"],
    ("interval", r"(-\infty, 2] \cup [3, \infty)"): [
        r"x \in [3,+\infty) \cup (-\infty,2]",
        "(-\u221e,2]\u222a[3,\u221e)",
    ],
    ("interval", "(-1, 5)"): ["]-1,5[", r"\left(-1,\,5\right)"],
}
WRONG = {
    ("fraction", r"\frac{16}{21}"): [
        r"\frac{8}{6} - \frac{4}{7}",
        "8/6-4/7+0",
        r"\frac{32}{42}",
        r"\frac{16}{21} + 0",
        "0.761905",
    ],
    ("number", "12"): [
        *(r"12\%", "12|77", "12 or 77", "12, 77", "12;77", "10+2", "12x", "12 77", "12!", r"\binom{12}{1}", "12^1"),
        *(r"12 \cdot 1", "77 = 12", "12/1/1", r"\sqrt{144}", r"\frac{24}{\frac{4}{2}}", r"\log 12", "12 or"),
    ],
    ("number", "x = -22"): ["y = -22", "x + 22 = 0", "3x - 18 = 4x + 4"],
    ("simplest root", r"10\sqrt{13}"): [
        r"2\sqrt{325}",
        r"\sqrt{1300}",
        r"\sqrt{13}\sqrt{100}",
        r"\frac{130}{\sqrt{13}}",
    ],
    ("root", r"\frac{2\sqrt{11}}{11}"): [
        r"\frac{2}{\sqrt{11}}",
        r"2/\sqrt{11}",
        r"\sqrt{\frac{4}{11}}",
        r"\sqrt{4}/\sqrt{11}",
    ],
    ("root", "5"): [r"\sqrt{25}", r"\sqrt{3^2+4^2}"],
    ("polynomial", "2x^2 - 18"): ["(x + 3)(2x - 6)", "2(x^2-9)", "2x^2 - 12x + 12x - 18", "2y^2 - 18", "x(2x) - 18"],
    ("polynomial", "y = -4x - 3"): ["y = -4(x - 1) - 7", "4x + y = -3", "x = -4y - 3"],
    ("set", r"\{-3, 4\}"): [
        "-3",
        "-3, 4, 5",
        "(-3, 4)",
        r"\{-3\} \cup \{4\}",
        r"\{x : x^2 - x = 12\}",
        "x^2 - x - 12 = 0",
    ],
    ("set", r"\{13\}"): ["13", "x = 13"],
    ("pair", "(1, -2)"): ["(-2, 1)", "[1, -2]", "x = -2, y = 1", "(1, -2), (3, 4)", r"\{1, -2\}"],
    ("interval", "(-1, 5)"): [
        "[-1, 5]",
        "|x - 2| < 3",
        "(-1, 5]",
        r"(-1, 5) \cup (0, 1)",
        "(-1, 5), (0, 1)",
        "(5, -1)",
    ],
}


@pytest.mark.parametrize(("form", "answer"), RIGHT)
def test_other_usual_ways_to_write_an_answer_are_right(form, answer):
    """As they stand, and out of a box."""
    for text in (answer, *RIGHT[form, answer]):
        assert same(form, text, answer), text
        assert same(form, last_answer(rf"So it is $\boxed{{{text}}}$."), answer), text


@pytest.mark.parametrize(("form", "answer"), WRONG)
def test_what_is_not_in_the_form_or_means_another_thing_is_wrong(form, answer):
    """Even where it is equal."""
    for text in WRONG[form, answer]:
        assert not same(form, text, answer), text


def test_every_answer_of_the_recipe_is_in_its_form():
    """And is read as itself."""
    for problem in problems():
        assert same(problem.form, problem.answer, problem.answer), problem


@given(st.fractions(max_denominator=10**6).filter(lambda f: abs(f) < 10**9))
def test_a_fraction_is_read_as_its_value(value):
    """However large; its double over its double is the same number, and not in lowest terms."""
    text = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    double = rf"\frac{{{2 * value.numerator}}}{{{2 * value.denominator}}}"
    assert read("fraction", text) == read("number", double) == value
    assert read("fraction", double) is None


@given(st.dictionaries(st.integers(0, 9), st.integers(-99, 99).filter(bool), min_size=1), st.randoms())
def test_a_polynomial_is_its_terms_in_any_order(terms, random):
    """Each power once."""
    shown = [
        f"{'+' if size > 0 else '-'}{abs(size)}" + (f"x^{{{power}}}" if power else "") for power, size in terms.items()
    ]
    text = "".join(shown)
    random.shuffle(shown)
    assert read("polynomial", "".join(shown)) == read("polynomial", text) is not None
    assert read("polynomial", text + shown[0]) is None


@given(st.sampled_from(sorted(FORMS)), st.text(alphabet="0123456789x+-*/^(){}[]|,.;=%\\ frcsqtinpmuo", max_size=60))
def test_any_text_is_read_or_is_not(form, text):
    """Never an error, and a way of writing it settles at once."""
    read(form, text)
    last_answer(text)
    assert isinstance(written(text), str)


@pytest.mark.parametrize(
    "text", ["1/0", r"\frac{1}{0}", "9" * 5000, r"\sqrt{" * 900, "-" * 500, "(" * 500, r"\sqrt{999999999999}"]
)
def test_what_would_take_for_ever_or_fail_is_no_answer(text):
    """Divisions by zero, numbers of any length, brackets without end."""
    assert all(read(form, text) is None for form in FORMS)


@pytest.mark.parametrize(
    "piece", ["(", "-(", "(1", "1)", " ", "$", "\\(", "1,", "1 ", "\\boxed{", "answer ", " or ", "{"]
)
def test_a_long_response_is_looked_through_quickly(piece):
    """In processor time: a fifth of a reward's limit for the longest that is read, whatever it repeats."""
    for text in (piece, f"1{piece}", rf"\boxed{{1}}{piece}"):
        response = (text + piece * 8192)[:8192]
        started = time.process_time()
        last_answer(response)
        assert time.process_time() - started < 0.4


def test_hand_worked_readings():
    """So that reader and writer cannot be wrong in the same way."""
    assert read("number", r"-2\frac{1}{4}") == Fraction(-9, 4)
    assert read("root", r"\frac{\sqrt{44}}{11}") == (Fraction(2, 11), 11)
    assert read("polynomial", "x^2 - 3") == frozenset({("x", 2, Fraction(1)), ("", 0, Fraction(-3))})
    assert read("set", "1, 1, 2") == frozenset({Fraction(1), Fraction(2)})
