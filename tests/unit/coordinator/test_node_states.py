"""The table of a node's states, exhaustively; and that its words say the same."""

from __future__ import annotations

import re

import pytest

from echo2.coordinator import node_states
from echo2.coordinator.node_states import DELIVERING, EVENTS, EXPIRING, NEW, STATES, TABLE, Standing, overdue, step
from echo2.p2p.errors import Refused

WALL = 1_700_000_000.0


def documented():
    """{(from, event): to} of the table in the module's docstring."""
    found, event, target = {}, "", ""
    rows = re.findall(r"^\| (\S*) +\| [^|]*\| ([^|]+)\| (\S*) +\|[^|]*\|$", node_states.__doc__, re.MULTILINE)
    for word, befores, after in rows:
        if word in {"event", "state"} or not befores.strip(" -"):
            continue
        event, target = (word, after) if word else (event, target)
        names = STATES if "every state" in befores else [name.strip() for name in befores.split(",") if name.strip()]
        found |= {(name, event): target for name in names}
    return found


def test_the_words_and_the_table_say_the_same():
    """The comment that people read is the table that decides."""
    table = {key: "back" if isinstance(to, node_states._Back) else to for key, to in TABLE.items()}
    assert documented() == table
    assert {event for _, event in TABLE} == set(EVENTS)
    assert {state for state, _ in TABLE} == {"new", *STATES}


@pytest.mark.parametrize("state", ["new", *STATES])
@pytest.mark.parametrize("event", EVENTS)
def test_every_pair(state, event):
    """A pair that the table has gives its state and one whole record; any other is refused in words."""
    before = Standing(state, back="standby", number=4)
    facts = {"peer": "p", "actor": "a", "reason": "because", "wall": WALL, "expires": WALL + 60.0}
    if (state, event) not in TABLE:
        with pytest.raises(Refused, match=f"a node that is {state} cannot be") as refused:
            step(before, event, **facts)
        assert (refused.value.code, refused.value.retry_seconds) == ("node_state", None)
        return
    after, made = step(before, event, **facts)
    target = TABLE[state, event]
    assert after.state == ("standby" if isinstance(target, node_states._Back) else target)
    assert (made.from_state, made.to_state, made.event, made.number) == (state, after.state, event, 5)
    assert (made.peer, made.actor, made.reason, made.wall) == ("p", "a", "because", WALL)
    assert made.expires == after.expires == (WALL + 60.0 if after.state in EXPIRING else None)
    assert (after.event, after.actor, after.reason, after.since, after.number) == (event, "a", "because", WALL, 5)
    assert after.back == (state if state in DELIVERING else "standby")


@pytest.mark.parametrize("state", sorted(DELIVERING))
def test_what_left_comes_back_as_it_was(state):
    """Probation is not skipped by a restart, nor a drain undone."""
    facts = {"peer": "p", "actor": "p", "reason": "because", "wall": WALL}
    left, _ = step(Standing(state), "goodbye", **facts)
    assert left.state == "left"
    back, _ = step(left, "returned", **facts)
    assert back.state == state


@pytest.mark.parametrize("reason", ["", "  ", "\n"])
def test_a_reason_is_required(reason):
    """Every transition is explained."""
    with pytest.raises(Refused, match="say why"):
        step(NEW, "joined", peer="p", actor="a", reason=reason, wall=WALL)


@pytest.mark.parametrize("state", STATES)
def test_only_suspensions_and_bans_end_by_themselves(state):
    """At their expiry, not before, and never without one."""
    assert overdue(Standing(state, expires=WALL), WALL) is (state in EXPIRING)
    assert not overdue(Standing(state, expires=WALL), WALL - 0.001)
    assert not overdue(Standing(state, expires=None), WALL)
    if state in EXPIRING:
        assert TABLE[state, "lapsed"] == "probation"


def test_no_state_is_a_dead_end():
    """From every state the operator, or time, leads back to work."""
    good = {"active"}
    while True:
        more = {
            state
            for (state, event), to in TABLE.items()
            if event != "restored" and (isinstance(to, node_states._Back) or to in good)
        }
        if more <= good:
            break
        good |= more
    assert good >= {*STATES, "new"} - {"draining"}
    assert TABLE["draining", "restored"] == "active"
