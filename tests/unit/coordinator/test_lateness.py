"""Whose word makes a relay a leaf, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator.lateness import NAMES_MAX, REMEMBERED_SECONDS, Lateness

ORDER = (0, 1)
NAMES = "abcdef"


def plan(**sources):
    """A plan by what each node takes from whom: b="ra" is node b with sources r and a."""
    return SimpleNamespace(
        entries=[
            SimpleNamespace(node=SimpleNamespace(peer=node), edges=[SimpleNamespace(source=s) for s in above])
            for node, above in sources.items()
        ]
    )


def after(words, *, children=None, now=0.0):
    lateness = Lateness()
    lateness.planned(children or plan(b="a", c="a", d="a"))
    for accuser, late in words.items():
        lateness.said(accuser, late, ORDER, 0.0)
    return set(lateness.late(now))


def test_one_nodes_word_is_not_enough():
    """It may have a bad line, or lie; two that say the same are believed."""
    assert after({"b": ["a"]}) == set()
    assert after({"b": ["a"], "c": ["a"]}) == {"a"}
    assert after({"a": ["a"], "b": ["a"]}) == set()


def test_all_that_a_relay_serves_are_enough():
    """A relay with a single child has nobody else who could say it."""
    assert after({"b": ["a"]}, children=plan(b="a", c="b")) == {"a"}
    assert after({"b": ["a"]}, children=plan(b="r", c="r")) == set()  # it was to serve nobody: one word is still one


def test_who_waits_for_a_late_relay_is_not_late_itself():
    """Down a chain everyone is late; each names the one above, and only the first has nobody late to name."""
    chain = plan(b="a", c="b", d="c")
    assert after({"b": ["a"], "c": ["b"], "d": ["c"]}, children=chain) == {"a"}


def test_naming_an_innocent_excuses_nobody():
    """The relay that holds up the others names a neighbour, which nobody else finds late."""
    assert after({"a": ["b"], "b": ["a"], "c": ["a"]}, children=plan(b="a", c="a", d="b", e="b")) == {"a"}


def test_a_leaf_stays_one_while_the_words_count():
    """That it serves nobody in the plan made since does not take the word of its only child from it."""
    lateness = Lateness()
    lateness.planned(plan(b="a"))
    lateness.said("b", ["a"], ORDER, 0.0)
    lateness.planned(plan(a="r", b="r"))
    assert lateness.late(1.0) == {"a"}


def test_words_fade():
    """After ten minutes the relay is tried again; the same word said again and again does not make it longer."""
    lateness = Lateness()
    lateness.planned(plan(b="a", c="a"))
    for now in (0.0, 300.0, REMEMBERED_SECONDS - 1):
        lateness.said("b", ["a"], ORDER, now)
        lateness.said("c", ["a"], ORDER, now)
        assert lateness.late(now) == {"a"}
    assert lateness.late(REMEMBERED_SECONDS) == frozenset()
    for name in "bc":
        lateness.said(name, ["a"], (0, 2), REMEMBERED_SECONDS)  # of another broadcast: anew
    assert lateness.late(2 * REMEMBERED_SECONDS - 1) == {"a"}


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES)), st.integers(0, 5), st.floats(0, 2000)))
)
def test_whatever_is_said_is_bounded(words):
    """No node fills the memory, and nobody is late by his own word."""
    lateness = Lateness()
    for accuser, late, version, now in sorted(words, key=lambda word: word[3]):
        lateness.said(accuser, late, (0, version), now)
        for name in lateness.late(now):
            assert any(name in said for who, said in lateness._said.items() if who != name)
    for number in range(1000):
        lateness.said("a", [f"x{number}"], ORDER, 0.0)
    assert len(lateness._said["a"]) == NAMES_MAX
