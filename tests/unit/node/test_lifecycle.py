"""The lifecycle's table, and what holds whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.node.lifecycle import (
    Blocked,
    Cleared,
    Commanded,
    Facts,
    Installed,
    Joined,
    Lost,
    Started,
    State,
    Stopped,
    may_install,
    state_of,
    step,
)

sources = st.sampled_from(["engine", "disk"])
events = st.one_of(
    st.sampled_from([Started(), Joined(), Lost(), Installed(), Stopped()]),
    st.builds(Commanded, st.sampled_from(["run", "pause", "finish"])),
    st.builds(Blocked, sources, st.just("why")),
    st.builds(Cleared, sources),
)


def after(*happened) -> State:
    facts = Facts()
    for event in happened:
        facts = step(facts, event)
    return state_of(facts)


UP = (Started(), Joined(), Installed())


@pytest.mark.parametrize(
    ("happened", "state"),
    [
        ((), State.STARTING),
        ((Started(),), State.JOINING),
        ((Started(), Joined()), State.INSTALLING),
        (UP, State.WORKING),
        ((*UP, Lost()), State.JOINING),
        ((*UP, Lost(), Joined()), State.WORKING),
        ((*UP, Commanded("pause")), State.PAUSED),
        ((*UP, Commanded("pause"), Commanded("run")), State.WORKING),
        ((*UP, Commanded("finish")), State.FINISHING),
        ((*UP, Commanded("pause"), Commanded("finish")), State.FINISHING),
        ((*UP, Blocked("disk", "full")), State.BLOCKED),
        ((*UP, Blocked("disk", "full"), Blocked("engine", "dead"), Cleared("disk")), State.BLOCKED),
        ((*UP, Blocked("disk", "full"), Cleared("disk")), State.WORKING),
        ((Commanded("pause"), *UP), State.PAUSED),
        ((*UP, Stopped()), State.STOPPED),
    ],
)
def test_the_table(happened, state):
    """Each row, reached by the events that lead there."""
    assert after(*happened) is state


@given(st.lists(events))
def test_what_holds_whatever_happens(happened):
    """Stopped is for good; a paused or blocked node never works; only working follows from all facts being right."""
    facts = Facts()
    stopped = False
    for event in happened:
        facts = step(facts, event)
        stopped |= isinstance(event, Stopped)
        state = state_of(facts)
        assert (state is State.STOPPED) == stopped
        working = facts.started and facts.joined and facts.installed and facts.command == "run" and not facts.blocks
        assert (state is State.WORKING) == (working and not stopped)
        assert not may_install(facts) or (facts.joined and facts.command == "run")
        assert step(facts, event) == facts  # repeating an event changes nothing
