"""The activation loop, worked by hand: one deviation at a time, then any history."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator.activation import CONSIDERED_MAX, step
from echo2.coordinator.activation_records import Assignment, Candidate, Look, Need, Rules, State
from echo2.coordinator.activation_targets import surely
from echo2.coordinator.selection import Offer

PERIOD = 60.0
RULES = Rules(period_seconds=PERIOD, smooth_periods=0.0)


def node(peer, mu, dollars, available=True):
    return Candidate(peer, mu, round(dollars * 1e6), available)


class Loop:
    """The loop under a clock, ten seconds a look."""

    def __init__(self, *needs, rules=RULES):
        self.needs, self.rules, self.state, self.now, self.decisions = needs, rules, State(), 0.0, []

    def look(self, *candidates):
        self.state, found = step(self.state, Look(tuple(candidates), tuple(self.needs)), self.now, self.rules)
        self.now += 10.0
        self.decisions += found
        return found

    def until(self, *candidates, periods=4.0):
        """Looks until something is decided, at most so many periods."""
        end = self.now + periods * PERIOD
        while self.now <= end:
            found = self.look(*candidates)
            if found:
                return found
        return ()

    def at(self, run="r"):
        return {peer for peer, given in self.state.assigned.items() if given.run == run}


A, B, C, D = node("a", 2.0, 0.2), node("b", 2.0, 0.3), node("c", 2.0, 0.4), node("d", 2.0, 0.5)


def test_an_empty_pool_is_filled_at_once_with_the_cheapest():
    """mu_min 3, target 3.3: a and b at $0.20 and $0.30 make 4; the record has the numbers that decided."""
    loop = Loop(Need("r", 3.0))
    (made,) = loop.look(A, B, C, D)
    assert loop.at() == {"a", "b"}
    assert (made.action, made.cause, made.chosen) == ("activate", "empty", ("a", "b"))
    assert (made.mu_pool, made.mu_min, made.mu_target, made.mu_after) == (0.0, 3.0, pytest.approx(3.3), 4.0)
    assert (made.price_before, made.price_after) == (0, 500_000)
    assert [(each.peer, each.chosen) for each in made.considered] == [("a", 1), ("b", 1), ("c", 0), ("d", 0)]
    assert made.considered[0].rho == pytest.approx(200_000 / 3600 / 2)
    assert "mu_pool 0 is below mu_target 3.3" in made.reason
    assert json.loads(json.dumps(made.as_json()))["considered"][0]["peer"] == "a"
    assert loop.state.assigned["a"] == Assignment("r", 0.0, 2.0, 200_000)


def test_below_mu_min_for_a_period_is_filled_below_mu_target_for_three():
    """a and b at 1.4 each make 2.8 < 3: after 60 s. At 1.6 they make 3.2, between 3 and 3.3: after 180 s."""
    for rate, seconds, cause in ((1.4, 60.0, "starved"), (1.6, 180.0, "short")):
        loop = Loop(Need("r", 3.0))
        loop.look(A, B, C, D)
        (made,) = loop.until(node("a", rate, 0.2), node("b", rate, 0.3), C, D)
        assert (made.cause, made.deviation_seconds, made.chosen) == (cause, seconds, ("c",))


def test_a_short_dip_is_not_answered():
    """Fifty seconds below, ten above, again and again: never sustained."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B, C, D)
    for second in range(120):
        rate = 1.4 if second % 6 else 2.0
        assert loop.look(node("a", rate, 0.2), node("b", rate, 0.3), C, D) == ()


def test_the_dearest_are_released_after_a_sustained_surplus():
    """When mu_min falls to 1.5, a alone makes 2 >= 1.21 x 1.5; b goes, but not before ten periods after it came."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B, C)
    loop.needs = (Need("r", 1.5),)
    (made,) = loop.until(A, B, C, periods=14)
    assert (made.action, made.cause, made.chosen) == ("release", "surplus", ("b",))
    assert made.at == pytest.approx(10 * PERIOD + 3 * PERIOD, abs=11)
    assert (made.mu_pool, made.mu_after, made.price_after) == (4.0, 2.0, 200_000)
    assert loop.at() == {"a"}


def test_what_is_measured_is_smoothed_by_two_periods():
    """From 2 to 1 a second: 1.5 after one half-life, 1.25 after two; unmeasured for a while, a node keeps its rate."""
    state, rules = State(), Rules(period_seconds=PERIOD)
    for at, mu, seen in ((0, 2.0, 2.0), (120, 1.0, 1.5), (240, 1.0, 1.25), (360, None, 1.25)):
        state, _ = step(state, Look((node("a", mu, 0.1),), ()), float(at), rules)
        assert state.mu["a"] == pytest.approx(seen)


def test_a_small_surplus_is_kept():
    """1.1 x 1.1 x 1.7 = 2.06 > 2: without b there would be no margin left, so nothing is done."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B, C)
    loop.needs = (Need("r", 1.7),)
    assert loop.until(A, B, C, periods=30) == ()


def test_a_released_node_is_not_called_back_within_ten_periods():
    """Unless a working node was lost since: then it is the last resort."""
    loop = Loop(Need("r", 1.5))
    loop.state = State(
        assigned={"a": Assignment("r", 0.0, 2.0, 1)}, changed={"b": 0.0}, present=frozenset({"a"}), lost_at=-1.0
    )
    slow = node("a", 1.0, 0.2)
    found = loop.until(slow, B, periods=5)
    assert (found[0].action, found[0].cause) == ("none", "starved")
    assert loop.at() == {"a"}
    (made,) = loop.until(node("a", 2.0, 0.2, available=False), B, periods=2)
    assert made.chosen == ("b",)


def test_a_much_cheaper_pool_replaces_the_dear_one_make_before_break():
    """A newcomer at $0.10 for 4 a second beats $0.50: it starts after three periods, then a and b go, once they may."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B)
    new = node("new", 4.0, 0.1)
    (made,) = loop.until(A, B, new, periods=15)
    assert (made.action, made.cause, made.chosen) == ("activate", "saving", ("new",))
    assert "$0.1 instead of $0.5 an hour" in made.reason
    assert loop.at() == {"a", "b", "new"}
    (made,) = loop.until(A, B, new, periods=15)
    assert (made.action, made.chosen) == ("release", ("a", "b"))


def test_a_little_cheaper_is_not_worth_a_change():
    """$0.45 instead of $0.50 is 10 %: below a fifth nothing is changed."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B)
    assert loop.until(A, B, node("new", 4.0, 0.45), periods=30) == ()


def test_free_nodes_all_work_and_paid_ones_are_spare_beside_them():
    """Three volunteers make 6, more than 3.3: they are kept, and no paid node is taken."""
    loop = Loop(Need("r", 3.0))
    free = [node(name, 2.0, 0.0) for name in ("x", "y", "z")]
    (made,) = loop.look(A, *free)
    assert (made.cause, set(made.chosen)) == ("free", {"x", "y", "z"})
    assert "kept whatever the target is" in made.reason
    assert loop.until(A, *free, periods=30) == ()
    late = node("late", None, 0.0)
    (made,) = loop.look(A, late, *free)
    assert made.chosen == ("late",)  # unmeasured: it costs nothing to find out


def test_free_nodes_that_suffice_send_paid_ones_home():
    """a and b work; then two volunteers with 4 a second come."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B)
    free = [node(name, 2.0, 0.0) for name in ("x", "y")]
    (made,) = loop.look(A, B, *free)
    assert made.cause == "free"
    (made,) = loop.until(A, B, *free, periods=15)
    assert (made.action, set(made.chosen)) == ("release", {"a", "b"})


def test_a_paid_node_without_a_rate_is_tried_only_where_those_with_one_are_not_enough():
    """a makes 2 of 3.3; at the median one more would do: the cheaper of two unknown ones. It counts once measured."""
    loop = Loop(Need("r", 3.0))
    unknown, dear = node("unknown", None, 0.1), node("dear", None, 0.9)
    (made,) = loop.look(A, unknown, dear)
    assert made.chosen == ("a", "unknown")
    assert made.mu_after == 2.0
    assert loop.state.assigned["unknown"] == Assignment("r", 0.0, 0.0, 100_000)
    loop.look(A, node("unknown", 1.5, 0.1), dear)
    assert loop.state.assigned["unknown"] == Assignment("r", 0.0, 1.5, 100_000)
    assert loop.until(A, node("unknown", 1.5, 0.1), dear, periods=20) == ()
    enough = Loop(Need("r", 3.0))
    enough.look(A, B, unknown)
    assert enough.at() == {"a", "b"}


def test_where_nothing_is_known_one_at_a_time_is_tried():
    """The cheapest at once, the next one a period later, because the first still counts for nothing."""
    loop = Loop(Need("r", 3.0))
    pool = [node("x", None, 0.1), node("y", None, 0.2), node("z", None, 0.3)]
    (made,) = loop.look(*pool)
    assert made.chosen == ("x",)
    (made,) = loop.until(*pool)
    assert (made.chosen, made.cause) == (("y",), "starved")
    started = Loop(Need("r", None))
    (made,) = started.look(*pool)
    assert (made.chosen, made.cause) == (("x",), "unmeasured")
    assert {found.action for found in started.until(*pool, periods=9)} <= {"none"}


def test_one_that_was_tried_and_made_nothing_is_released_after_ten_periods():
    """Then the next one is tried at once; it would block the run for ever otherwise."""
    loop = Loop(Need("r", None))
    pool = [node("x", None, 0.1), node("y", None, 0.2)]
    loop.look(*pool)
    loop.until(*pool, periods=1)  # said: not measured yet
    released, tried = loop.until(*pool, periods=10)
    assert (released.action, released.cause, released.chosen) == ("release", "idle", ("x",))
    assert released.at == 10 * PERIOD
    assert (tried.action, tried.chosen) == ("activate", ("y",))


def test_one_node_works_until_there_is_a_measure():
    """Without T_train there is no mu_min: the lowest rho starts; a target may be set for the meantime."""
    loop = Loop(Need("r", None))
    (made,) = loop.look(A, B, C)
    assert (made.cause, made.chosen) == ("unmeasured", ("a",))
    assert loop.until(A, B, C, periods=5) == () or loop.decisions[-1].action == "none"
    assert loop.at() == {"a"}
    started = Loop(Need("r", None, mu_start=3.0))
    started.look(A, B, C)
    assert started.at() == {"a", "b"}


def test_where_no_rate_is_enough_nothing_is_changed():
    """More nodes would not help, and the reason says what would."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B, C)
    loop.needs = (Need("r", None, infeasible="kappa T_train = 20 s <= T_bcast = 30 s; raise kappa"),)
    (made,) = loop.until(A, B, C)
    assert (made.action, made.cause, made.reason) == ("none", "infeasible", loop.needs[0].infeasible)
    assert loop.at() == {"a", "b"}


def test_what_is_missing_is_said():
    """All that there is works, and the record says what lacks."""
    loop = Loop(Need("r", 10.0))
    (made,) = loop.look(A, B)
    assert loop.at() == {"a", "b"}
    assert "7 stay missing: no more can be had" in made.reason


def test_ceilings_hold():
    """No node above $0.35; all together at most $0.45: a alone, then nothing more."""
    loop = Loop(
        Need("r", 3.0),
        rules=Rules(period_seconds=PERIOD, smooth_periods=0.0, price_ceiling=350_000, spend_ceiling=450_000),
    )
    (made,) = loop.look(A, B, C)
    assert loop.at() == {"a"}
    assert "the spend ceiling leaves no more" in made.reason
    assert {each.peer for each in made.considered} == {"a", "b"}
    assert [found.action for found in (loop.until(A, B, C, periods=8) or ())] in ([], ["none"])


def test_who_went_away_loses_its_place_only_to_others():
    """b is away for 50 s: nothing happens. For longer: c takes its place, and b stands by when it is back."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B, C)
    away = node("b", 2.0, 0.3, available=False)
    for _ in range(5):
        assert loop.look(A, away, C) == ()
    assert loop.look(A, B, C) == ()
    (made,) = loop.until(A, away, C)
    assert (made.cause, made.chosen, made.lapsed) == ("starved", ("c",), ("b",))
    assert "1 node that went away" in made.reason
    loop.look(A, B, C)
    assert loop.at() == {"a", "c"}


def test_a_gap_after_a_loss_is_filled_within_a_period():
    """Without e, a and b are seen at 3.2, above mu_min 3 and below mu_target 3.3: c comes after 60 s instead of 180.

    Back within the period e keeps its place, and nothing is decided."""
    mu = node("a", 1.6, 0.2), node("b", 1.6, 0.3), node("e", 1.2, 0.35)
    gone = node("e", 1.2, 0.35, available=False)
    for seconds_away, decided in ((50, False), (70, True)):
        loop = Loop(Need("r", 3.9))
        loop.look(*mu, C)
        assert loop.at() == {"a", "b", "e"}
        loop.needs = (Need("r", 3.0),)
        loop.look(*mu, C)
        found = [loop.look(*mu[:2], gone, C) for _ in range(seconds_away // 10)]
        made = [each for decisions in found for each in decisions]
        assert bool(made) == decided
        if decided:
            assert (made[0].cause, made[0].deviation_seconds, made[0].chosen) == ("lost", 60.0, ("c",))
        else:
            assert loop.look(*mu, C) == ()
            assert loop.until(*mu, C, periods=2) == ()


def test_noise_about_mu_min_does_not_put_off_the_answer_to_a_loss():
    """What is left is seen just below and just above mu_min in turn, never for a period: filled after one all the
    same."""
    loop = Loop(Need("r", 3.0))
    loop.look(A, B, C)
    away = node("b", 2.0, 0.3, available=False)
    made = ()
    for look in range(8):
        made = made or loop.look(node("a", 2.95 if look % 2 else 3.05, 0.2), away, C)
    assert [(each.cause, each.deviation_seconds) for each in made] == [("lost", 60.0)]


def test_what_may_be_less_than_it_looks_is_not_enough_after_a_loss():
    """a alone is seen at 3.4, above mu_target 3.3, but by a `doubt` of 0.3 it may be 2.38: b comes after a period.

    Without a loss the same 3.4 is enough for good; so is 4.4 after one, 3.08 at least.
    """
    gone = node("e", 2.0, 0.2, available=False)
    for seen, lost, decided in ((3.4, True, True), (3.4, False, False), (4.4, True, False)):
        loop = Loop(Need("r", 4.8 if lost else 3.0))
        a, e = node("a", seen, 0.1), node("e", 2.0, 0.2)
        loop.look(a, e if lost else gone, B)
        assert loop.at() == ({"a", "e"} if lost else {"a"})
        loop.needs = (Need("r", 3.0),)
        found = loop.until(a, gone, B, periods=8)
        assert bool(found) == decided
        if decided:
            (made,) = found
            assert (made.cause, made.deviation_seconds, made.chosen, made.lapsed) == ("lost", 60.0, ("b",), ("e",))
            assert "since a loss mu_pool 3.4 may be no more than 2.38, below mu_min 3 for 60 s" in made.reason


def test_those_called_in_after_a_loss_make_mu_min_even_if_they_were_picked_for_looking_fast():
    """What is left makes 2, and 1.3 are missing to mu_target: f at 1.35 is the cheapest. But together they may be
    3.35 - 0.3 sqrt(2^2 + 1.35^2) = 2.63; with g at 2 it is 4 - 0.3 sqrt(8) = 3.15."""
    f, g, gone = node("f", 1.35, 0.3), node("g", 2.0, 0.5), node("e", 2.0, 0.2, available=False)
    loop = Loop(Need("r", 3.0))
    loop.look(A, node("e", 2.0, 0.2), f, g)
    assert loop.at() == {"a", "e"}
    (made,) = loop.until(A, gone, f, g)
    assert (made.cause, made.chosen, made.mu_after) == ("starved", ("g",), 4.0)
    first = Loop(Need("r", 3.0))
    first.look(A, f, g)
    assert first.at() == {"a", "f"}  # no loss: mu is as it is measured


def test_a_loss_that_nobody_can_fill_is_over_after_three_periods():
    """a makes the target as far as one can see, and nobody stands by; one that comes after that is not needed."""
    loop = Loop(Need("r", 4.8))
    a, gone = node("a", 3.4, 0.1), node("e", 2.0, 0.2, available=False)
    loop.look(a, node("e", 2.0, 0.2))
    loop.needs = (Need("r", 3.0),)
    (said,) = loop.until(a, gone)
    assert (said.action, said.cause) == ("none", "lost")
    assert loop.until(a, gone) == ()
    assert ("r", "lost") not in loop.state.since
    assert loop.until(a, gone, B, periods=8) == ()


def test_where_all_there_are_cannot_make_mu_min_everybody_works_at_once():
    """Without b and e, a, c and f make 5.5 of mu_min 6: no period is waited, nobody loses its place, it is said once.
    When b is back it works at once, and mu_pool is above mu_target."""
    loop = Loop(Need("r", 6.0))
    e, f = node("e", 2.0, 0.25), node("f", 1.5, 0.8)
    loop.look(A, B, C, e, f)
    assert loop.at() == {"a", "b", "c", "e"}
    away = [node(each.peer, each.mu, each.price / 1e6, available=False) for each in (B, e)]
    (made,) = loop.look(A, *away, C, f)
    assert (made.action, made.cause, made.chosen, made.lapsed) == ("activate", "impossible", ("f",), ())
    assert made.reason.startswith("mu_pool 4, and 5.5 with all that can be had, is below mu_min 6: everybody works")
    assert loop.until(A, *away, C, f, periods=20) == ()
    assert loop.look(A, B, away[1], C, f) == ()
    assert loop.state.standing["r"] == "steady"
    assert loop.at() == {"a", "b", "c", "e", "f"}


def test_it_is_as_impossible_where_they_went_one_after_the_other():
    """Without b the others make enough for sure; b is still known to have gone when e is found gone a look later."""
    loop = Loop(Need("r", 6.0))
    e, f = node("e", 2.0, 0.25), node("f", 1.5, 0.8)
    loop.look(A, B, C, e, f)
    loop.needs = (Need("r", 4.0),)
    away = [node(each.peer, each.mu, each.price / 1e6, available=False) for each in (B, e)]
    assert loop.look(A, away[0], C, e, f) == ()
    assert ("r", "lost") not in loop.state.since
    loop.needs = (Need("r", 6.0),)
    (made,) = loop.look(A, *away, C, f)
    assert (made.cause, made.chosen) == ("impossible", ("f",))
    assert loop.until(A, *away, C, f) == ()


def test_a_loss_is_answered_at_once_where_all_there_are_make_no_mu_target():
    """a and f make 3.2, between mu_min 3 and mu_target 3.3: nothing to choose. With g there is, so it waits."""
    f, g, gone = node("f", 1.2, 0.5), node("g", 1.2, 0.6), node("b", 2.0, 0.3, available=False)
    for others, seconds in (((f,), 0.0), ((f, g), 60.0)):
        loop = Loop(Need("r", 3.0))
        loop.look(A, B, *others)
        assert loop.at() == {"a", "b"}
        (made,) = loop.until(A, gone, *others)
        assert made.deviation_seconds == seconds
        assert made.cause == ("starved" if seconds else "lost")


def test_the_spend_ceiling_takes_the_place_of_one_that_is_away_also_where_it_is_impossible():
    """$0.70 are enough for a and b, or for a and c, not for all three: were b back, it would be too much."""
    away = node("b", 2.0, 0.3, available=False)
    for ceiling, lapsed in ((700_000, ("b",)), (900_000, ())):
        loop = Loop(Need("r", 4.5), rules=Rules(period_seconds=PERIOD, smooth_periods=0.0, spend_ceiling=ceiling))
        loop.look(A, B, node("c", 2.0, 0.9, available=False))
        assert loop.at() == {"a", "b"}
        loop.look(A, B, node("c", 2.0, 0.4, available=False))
        loop.look(A, away, node("c", 2.0, 0.4, available=False))
        loop.look(A, away, C)
        (made,) = loop.look(A, away, C)
        assert (made.cause, made.chosen, made.lapsed) == ("impossible", ("c",), lapsed)


def test_noise_about_mu_min_does_not_say_each_time_that_it_is_impossible():
    """All there are are seen just below and just above mu_min in turn: said once, until they make mu_target."""
    loop = Loop(Need("r", 3.0))
    for look in range(60):
        loop.look(node("a", 2.95 if look // 6 % 2 else 3.05, 0.2))
    assert [(made.action, made.cause) for made in loop.decisions] == [("activate", "empty"), ("none", "impossible")]
    loop.until(node("a", 3.4, 0.2), periods=1)
    loop.until(node("a", 2.95, 0.2), periods=1)
    assert [made.cause for made in loop.decisions[2:]] == ["impossible"]


def test_whoever_is_heard_first_is_not_taken_for_all_there_are():
    """After a restart a and b are heard of a look after c, which stands by: nothing is done. Nor after a cut line, when
    all were gone for a while. Where a and b stay away it is said after a period, and c works."""
    meant = {"a": Assignment("r", 0.0, 2.0, 200_000), "b": Assignment("r", 0.0, 2.0, 300_000)}
    gone = [node(each.peer, each.mu, each.price / 1e6, available=False) for each in (A, B, C)]
    loop = Loop(Need("r", 3.0))
    loop.state = State(dict(meant))
    assert loop.look(A, gone[1], C) == ()
    assert loop.until(A, B, C) == ()
    loop.look(*gone)
    assert loop.look(A, gone[1], C) == ()
    assert loop.until(A, B, C) == ()
    for first in ((A, gone[1], D), (A, gone[1])):
        stays = Loop(Need("r", 6.0))
        stays.state = State(dict(meant))
        (made,) = stays.until(*first)
        assert (made.cause, made.deviation_seconds, made.at) == ("impossible", 0.0, PERIOD)


def test_it_is_not_called_impossible_while_somebody_is_unmeasured_or_rests():
    """What those could make is not known, or only not to be had yet."""
    loop = Loop(Need("r", 6.0))
    loop.look(A, B, node("x", None, 0.9))
    assert loop.decisions[-1].cause == "empty"
    resting = Loop(Need("r", 3.0))
    resting.state = State(assigned={"a": Assignment("r", 0.0, 2.0, 1)}, changed={"b": 0.0})
    (made,) = resting.until(A, B)
    assert (made.action, made.cause) == ("none", "starved")


@given(
    st.lists(st.tuples(st.floats(0.2, 5.0), st.integers(1, 800_000)), min_size=2, max_size=10),
    st.integers(1, 9),
    st.floats(0.2, 6.0),
)
def test_what_is_called_in_after_a_loss_makes_mu_min_for_sure_or_is_everybody(measured, working, least):
    """Whatever the rates and prices; and it makes mu_target, or is everybody."""
    up = [Candidate(f"n{i}", mu, price) for i, (mu, price) in enumerate(measured)]
    stay = up[: min(working, len(up) - 1)]
    gone = Candidate("gone", 1.0, 5, available=False)
    state = State(
        assigned={each.peer: Assignment("r", 0.0, each.mu, each.price) for each in (*stay, gone)},
        present=frozenset({"gone"}),
    )
    look = Look((*up, gone), (Need("r", least),))
    state, _ = step(state, look, 0.0, RULES)
    state, _ = step(state, look, PERIOD, RULES)
    works = [Offer(each.peer, each.mu, each.price) for each in up if each.peer in state.assigned]
    if len(works) < len(up):
        assert surely(works, RULES.doubt) >= least * (1 - 1e-9)
        assert sum(each.mu for each in works) >= RULES.gamma * least * (1 - 1e-9)


def test_errors_add_up_as_squares():
    """3 and 4 at a doubt of 0.3: 7 - 0.3 x 5. Nobody makes nothing."""
    assert surely([Offer("a", 3.0, 1), Offer("b", 4.0, 1)], 0.3) == pytest.approx(5.5)
    assert surely([], 0.3) == 0


def test_the_order_without_prices_is_a_seeded_shuffle():
    """`nocost`: other seeds choose others, the same seed the same, and the price has no say."""
    pool = [node(f"n{i}", 1.0, 0.1 * (i + 1)) for i in range(12)]
    chosen = set()
    for seed in range(8):
        loop = Loop(Need("r", 3.6), rules=Rules(period_seconds=PERIOD, smooth_periods=0.0, nocost_seed=seed))
        again = Loop(Need("r", 3.6), rules=Rules(period_seconds=PERIOD, smooth_periods=0.0, nocost_seed=seed))
        loop.look(*pool)
        again.look(*pool[::-1])
        assert loop.at() == again.at()
        assert len(loop.at()) == 4
        chosen.add(frozenset(loop.at()))
    assert len(chosen) > 4


def test_two_runs_share_by_weight_where_the_pool_cannot_make_both():
    """8 a second for targets of 6.6 and 6.6 at weights 3 to 1: 6 and 2; each node works for one of them."""
    loop = Loop(Need("heavy", 6.0, weight=3.0), Need("light", 6.0, weight=1.0))
    pool = [node(f"n{i}", 1.0, 0.1) for i in range(8)]
    found = loop.look(*pool)
    assert (len(loop.at("heavy")), len(loop.at("light"))) == (6, 2)
    assert {made.run: made.mu_target for made in found} == {"heavy": pytest.approx(6.0), "light": pytest.approx(2.0)}
    assert {made.run: made.share for made in found} == {
        "heavy": pytest.approx(6 / 6.6),
        "light": pytest.approx(2 / 6.6),
    }


def test_a_run_that_wants_less_than_its_share_leaves_the_rest():
    """Targets 1.1 and 11 of 8 at equal weights: the small one has all it asked for, the other what is left."""
    loop = Loop(Need("large", 10.0), Need("small", 1.0))
    found = loop.look(*[node(f"n{i}", 1.0, 0.1) for i in range(8)])
    targets = {made.run: made.mu_target for made in found}
    assert targets == {"small": pytest.approx(1.1), "large": pytest.approx(6.9)}


def test_free_nodes_are_shared_by_need_and_moved_only_when_there_is_one_to_spare():
    """Two runs, four volunteers: two each. When one run needs nothing any more, its nodes go to the other."""
    loop = Loop(Need("one", 1.8), Need("two", 1.8))
    free = [node(f"v{i}", 1.0, 0.0) for i in range(4)]
    loop.look(*free)
    assert (len(loop.at("one")), len(loop.at("two"))) == (2, 2)
    loop.needs = (Need("one", 0.1), Need("two", 2.7))
    (made,) = loop.until(*free)
    assert (made.run, made.cause) == ("two", "starved")
    assert (len(loop.at("one")), len(loop.at("two"))) == (1, 3)


def test_nodes_of_a_run_that_is_over_stand_by():
    """They can be activated at once for another."""
    loop = Loop(Need("one", 3.0))
    loop.look(A, B)
    loop.needs = (Need("two", 3.0),)
    found = loop.look(A, B)
    assert [(made.run, made.action, made.cause) for made in found] == [
        ("one", "release", "over"),
        ("two", "activate", "empty"),
    ]
    assert loop.at("two") == {"a", "b"}


def test_a_record_stays_small_in_a_pool_of_thousands():
    """The cheapest are in it, and how many there were."""
    loop = Loop(Need("r", 3.0))
    (made,) = loop.look(*[node(f"n{i:04}", 1.0, 0.1 + i / 1e4) for i in range(2000)])
    assert (len(made.considered), made.considered_count) == (CONSIDERED_MAX, 2000)


@given(
    looks=st.lists(
        st.tuples(
            st.lists(st.tuples(st.floats(0.2, 5.0), st.booleans()), min_size=8, max_size=8),
            st.floats(0.1, 20.0),
            st.floats(1.0, 90.0),
        ),
        min_size=1,
        max_size=40,
    ),
    seed=st.sampled_from([None, 1]),
)
def test_whatever_happens_no_mind_is_changed_twice_within_ten_periods(looks, seed):
    """Any rates, needs and absences: paid nodes rest after each change; only a loss may call one back once."""
    rules = Rules(period_seconds=PERIOD, smooth_periods=0.0, nocost_seed=seed)
    state, now, changes = State(), 0.0, {}
    for measured, least, seconds in looks:
        candidates = tuple(Candidate(f"n{i}", mu, i * 100_000, up) for i, (mu, up) in enumerate(measured))
        before = state
        state, decisions = step(state, Look(candidates, (Need("r", least),)), now, rules)
        if decisions:
            working = [mu for i, (mu, up) in enumerate(measured) if up and f"n{i}" in state.assigned]
            assert decisions[-1].mu_after == pytest.approx(sum(working))
        for made in decisions:
            assert set(made.chosen).isdisjoint(made.lapsed)
            for peer in made.chosen:
                assert (peer in state.assigned) == (made.action == "activate")
                if made.cause == "free":
                    continue
                last = changes.get(peer)
                recalled = made.action == "activate" and last is not None and last < state.lost_at
                assert last is None or now - last >= 10 * PERIOD or recalled
                changes[peer] = now
            for peer in made.lapsed:
                assert peer in before.assigned
                changes[peer] = now
        now += seconds
