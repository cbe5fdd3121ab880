"""Which run each node of a pool works for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator.placing import Placed, Share, place

TWO = [Share("a"), Share("b")]


def settled(nodes, runs, looks=200):
    """What the pool comes to, and after how many looks nothing changes any more."""
    for count in range(looks):
        moves = place(nodes, runs)
        if not moves:
            return nodes, count
        nodes = [Placed(n.peer, moves.get(n.peer, n.run), n.wanted) for n in nodes]
    raise AssertionError("it never settles")


def pool(*runs):
    """Nodes n0, n1, ... of these runs."""
    return [Placed(f"n{i}", run) for i, run in enumerate(runs)]


def held(nodes):
    """How many nodes each run has."""
    return Counter(node.run for node in nodes)


def test_new_nodes_go_where_most_is_lacking():
    """Six nodes of no run are shared two to one by weights of two to one, at once."""
    moves = place(pool(*[""] * 6), [Share("a", 2.0), Share("b", 1.0)])
    assert Counter(moves.values()) == {"a": 4, "b": 2}


def test_a_run_that_ends_gives_its_nodes_to_the_others():
    """None stays with a run that is over or paused while another is open."""
    nodes, _ = settled(pool("a", "a", "b", "b"), [Share("a", open=False, over=True), Share("b"), Share("c")])
    assert held(nodes) == {"b": 2, "c": 2}


def test_nobody_is_moved_where_nothing_is_open():
    """Nodes of runs that wait stay; one of no run waits in the first that is not over."""
    runs = [Share("over", open=False, over=True), Share("a", open=False), Share("b", open=False)]
    assert place(pool("b", "over", ""), runs) == {"n2": "a"}


def test_one_node_a_look_moves_between_open_runs():
    """Three of one run and none of the other become two and one, and stay so: no move to and fro."""
    nodes = pool("a", "a", "a")
    assert len(place(nodes, TWO)) == 1
    nodes, looks = settled(nodes, TWO)
    assert (held(nodes), looks) == ({"a": 2, "b": 1}, 1)


def test_a_run_of_little_weight_has_one_node():
    """A hundredth of five nodes is no node; it gets one all the same, and a single node stays where it is."""
    nodes, _ = settled(pool("a", "a", "a", "a", "a"), [Share("a", 99.0), Share("b", 1.0)])
    assert held(nodes) == {"a": 4, "b": 1}
    assert place(pool("a"), TWO) == {}


def test_a_join_string_that_names_a_run_is_obeyed():
    """Its node goes there and is never moved; others make up the shares. A run that is not served is not gone to."""
    nodes = [Placed("x", "", wanted="a"), Placed("y", "a", wanted="a"), Placed("z", "a"), Placed("q", "a", wanted="no")]
    nodes, _ = settled(nodes, TWO)
    assert {node.peer: node.run for node in nodes} == {"x": "a", "y": "a", "z": "b", "q": "a"}


@st.composite
def pools(draw):
    """Any pool in any state, any runs."""
    runs = [
        Share(name, draw(st.floats(0.1, 10.0)), open=draw(st.booleans()), over=False)
        for name in "abcd"[: draw(st.integers(1, 4))]
    ]
    names = [*(share.run for share in runs), "", "gone"]
    count = draw(st.integers(0, 12))
    nodes = [
        Placed(
            f"n{i:02}",
            draw(st.sampled_from(names)),
            draw(st.none() | st.sampled_from(names[: len(runs)])),
        )
        for i in range(count)
    ]
    return nodes, runs


@given(pools())
def test_every_pool_settles_in_open_runs(found):
    """Whatever the start, the moves end; the free are in open runs, the bound where they want."""
    nodes, runs = found
    open_ones = {share.run for share in runs if share.open}
    nodes, _ = settled(nodes, runs)
    for node in nodes:
        assert node.wanted in {None, node.run}
        assert node.wanted or node.run in (open_ones or {share.run for share in runs} | {"gone"})


@given(pools())
def test_shares_are_within_a_node(found):
    """Of pools of free nodes no open run is a node and a quarter from its share, but for the one each must have."""
    nodes, runs = found
    nodes = [Placed(node.peer, node.run) for node in nodes]
    nodes, _ = settled(nodes, runs)
    open_ones = [share for share in runs if share.open]
    weights = sum(share.weight for share in open_ones)
    for share in open_ones:
        fair = len(nodes) * share.weight / weights
        assert held(nodes)[share.run] == 1 or abs(held(nodes)[share.run] - fair) < 1.25 + len(open_ones) - 1


@given(pools())
def test_at_most_one_leaves_an_open_run_at_a_look(found):
    """Each move costs a download: only one node that could go on working is moved at a time."""
    nodes, runs = found
    open_ones = {share.run for share in runs if share.open}
    runs_of = {node.peer: node for node in nodes}
    moves = place(nodes, runs)
    assert sum(runs_of[p].run in open_ones and runs_of[p].wanted is None for p in moves) <= 1
