"""A task's name and options as one comparable thing."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.tasks.task import OPTIONS_BYTES_MAX, TaskSpec

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_the_order_of_options_does_not_matter():
    """Hand-worked: the canonical text is sorted, without blanks, in ASCII."""
    spec = TaskSpec("math", {"b": [1, 2], "a": "\u00e9"})
    assert spec.options_json == '{"a":"\\u00e9","b":[1,2]}'
    assert spec == TaskSpec("math", {"a": "\u00e9", "b": (1, 2)})
    assert len({spec, TaskSpec("math", {"a": "\u00e9", "b": [1, 2]}), TaskSpec("math")}) == 2


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=4))
def test_a_spec_survives_its_own_json(options):
    """What a worker or a lease is told is what was meant."""
    spec = TaskSpec("x", options)
    assert TaskSpec.from_json("x", spec.options_json) == spec


def test_nobody_changes_a_spec_afterwards():
    """The options are a copy, and read-only."""
    options = {"a": [1]}
    spec = TaskSpec("x", options)
    options["a"].append(2)
    assert spec.options == {"a": [1]}
    with pytest.raises(TypeError):
        spec.options["a"] = 3


@pytest.mark.parametrize(
    "options",
    [
        {"a": float("nan")},
        {"a": datetime.date(2026, 1, 1)},
        {1: "a"},
        {"a": {2: "b"}},
        ["a"],
        "a",
        {"a": "x" * OPTIONS_BYTES_MAX},
        {"a": b"bytes"},
    ],
)
def test_what_json_cannot_hold_is_refused(options):
    """ValueError with a message, never another error."""
    with pytest.raises(ValueError, match="options"):
        TaskSpec("x", options)


@pytest.mark.parametrize("text", ["", "[", "[]", "1", "[" * 4000, '{"a":NaN}', '{"a":"' + "x" * 5000 + '"}'])
def test_bad_json_is_refused(text):
    """Also what is JSON and no table."""
    with pytest.raises(ValueError, match="options"):
        TaskSpec.from_json("x", text)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "a/b", "\n"])
def test_a_name_is_a_word(name):
    """As the wire's names are."""
    with pytest.raises(ValueError, match="name"):
        TaskSpec(name)
