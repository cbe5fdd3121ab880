"""Benchmark, warm-up and the window of leases, by hand and by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator.probation import LEASES_MIN, WINDOW_LEASES, Benchmark, LeaseWindow, Probation, WarmupRules

RULES = WarmupRules(10, 0.8)


def ids(*numbers):
    return [b"%d" % number for number in numbers]


def back(probation, number, *, now=10.0, samples=2, tokens=20, in_time=True, valid=True):
    return probation.came_back(b"%d" % number, samples=samples, tokens=tokens, in_time=in_time, valid=valid, now=now)


def test_the_first_grant_is_the_benchmark():
    """Three leases granted at 4 s, the last back at 9 s: 6 rollouts and 90 tokens in 5 s."""
    probation = Probation().granted(ids(1, 2, 3), 4.0, RULES)
    probation = back(probation, 1, now=6.0, tokens=20)
    probation = probation.granted(ids(4), 6.5, RULES)  # a later grant is no part of it
    probation = back(probation, 4, now=7.0, tokens=1000)
    probation = back(probation, 3, now=8.0, tokens=30)
    assert probation.benchmark is None
    probation = back(probation, 2, now=9.0, tokens=40)
    assert probation.benchmark == Benchmark(6 / 5, 90 / 5)


@pytest.mark.parametrize("how", ["refused", "late", "expired", "lost version"])
def test_a_benchmark_that_is_not_whole_is_tried_again(how):
    """The next grant is one."""
    probation = Probation().granted(ids(1, 2), 0.0, RULES)
    if how in {"refused", "late"}:
        probation = back(probation, 1, valid=how != "refused", in_time=how != "late")
    else:
        probation = probation.lost(b"1", "late" if how == "expired" else "none")
    probation = back(probation, 2, now=3.0)
    assert probation.benchmark is None
    probation = back(probation.granted(ids(3), 5.0, RULES), 3, now=6.0)
    assert probation.benchmark == Benchmark(2.0, 20.0)


def test_eight_of_ten_pass_and_three_failed_do_not():
    """80 % of ten leases is eight: certain with the eighth that comes back, hopeless with the third that does not."""
    probation = Probation().granted(ids(*range(12)), 0.0, RULES)
    assert len(probation.out) == 10, "the eleventh and twelfth are no part of the warm-up"
    for number in range(12):
        probation = back(probation, number) if number not in {3, 5} else probation.lost(b"%d" % number, "late")
        verdict = probation.verdict(RULES)
        if number < 9:
            assert verdict is None
    assert (probation.returned, probation.failed) == (8, 2)
    assert probation.verdict(RULES) is None, "it is not measured yet: its first grant was not whole"
    probation = back(probation.granted(ids(20), 0.0, RULES), 20)
    assert probation.verdict(RULES).passed
    failed = Probation().granted(ids(*range(10)), 0.0, RULES)
    for number in range(3):
        assert failed.verdict(RULES) is None
        failed = back(failed, number, valid=number != 0, in_time=number != 1)
        if number == 2:
            failed = failed.lost(b"3", "late")
    verdict = failed.verdict(RULES)
    assert not verdict.passed
    assert "3 of its first 10 leases did not come back valid in time; 8 must" in verdict.reason


def test_too_slow_is_said_with_both_numbers():
    """The benchmark's minimum, where the operator sets one."""
    rules = WarmupRules(10, 0.8, tokens_per_second_min=50.0)
    probation = back(Probation().granted(ids(1), 0.0, rules), 1, now=1.0, tokens=49)
    verdict = probation.verdict(rules)
    assert (verdict.passed, verdict.reason) == (
        False, "too slow: 49.0 tokens/s in its benchmark, this pool asks for 50",
    )  # fmt: skip


def test_without_leases_to_prove_there_is_no_probation():
    """`warmup_leases = 0`."""
    assert Probation().verdict(WarmupRules(0, 0.8)).passed


@given(st.data(), st.integers(1, 20), st.floats(0.05, 1.0))
def test_a_verdict_is_certain_and_comes_in_time(data, leases, share):
    """Whatever happens to its leases: passed iff enough came back, and known by the last of them at the latest."""
    rules = WarmupRules(leases, share)
    probation, number, good, bad = Probation(), 0, 0, 0
    while probation.verdict(rules) is None:
        out = sorted(probation.out)
        if not out:
            probation = probation.granted(ids(*range(number, number + data.draw(st.integers(1, 5)))), 0.0, rules)
            number += 5
            assert probation.out, "there is always a way on"
            continue
        lease, how = data.draw(st.sampled_from(out)), data.draw(st.sampled_from(["good", "late", "gone", "none"]))
        if how == "good":
            probation = probation.came_back(lease, samples=1, tokens=1, in_time=True, valid=True, now=1.0)
        else:
            probation = probation.lost(lease, how)
        good, bad = good + (how == "good"), bad + (how == "late")
        assert (probation.returned, probation.failed) == (good, bad)
        if good + bad == leases and probation.verdict(rules) is None:
            # Every lease is accounted for: only the measurement may be missing.
            assert good >= rules.returned_min
            assert probation.benchmark is None
            return
        if number > 500:
            return
    verdict = probation.verdict(rules)
    assert verdict.passed is (bad <= leases - rules.returned_min)


def window(returned, late=0, gone=()):
    made = LeaseWindow()
    number = 0
    for _ in range(returned):
        made.note_returned(b"r", in_time=True)
    for _ in range(late):
        number += 1
        made.note_lost(b"%d" % number, "late", 0.0)
    for at, count in enumerate(gone):
        for _ in range(count):
            number += 1
            made.note_lost(b"%d" % number, "gone", float(at))
    return made


@pytest.mark.parametrize(
    ("returned", "late", "gone", "suspended"),
    [
        (38, 2, (), False),  # 5.0 %
        (37, 3, (), True),  # 7.5 %
        (0, 39, (), False),  # too few to say
        (40, 0, (16,), False),  # one kill -9 takes all it held, once
        (40, 0, (16, 4), True),  # the second counts: 4 of 60
        (100, 0, (16, 4), False),  # 4 of 120
        (100, 6, (16,), False),  # 6 of 122
        (100, 7, (16,), True),  # 7 of 123
    ],
)
def test_five_percent(returned, late, gone, suspended):
    """More than 5 % of the last leases, 40 of them at least, the worst end of a process forgiven."""
    assert bool(window(returned, late, gone).verdict(0.05)) is suspended


def test_a_slice_that_comes_after_all_is_no_lost_lease():
    """The node's spool survives what took the process."""
    made = window(37, 3)
    made.note_returned(b"2", in_time=False)
    assert (len(made), made.lost, made.verdict(0.05)) == (40, 2, "")
    made.note_returned(b"2", in_time=False)
    assert made.lost == 2


def test_what_the_coordinator_took_back_does_not_count():
    """A lease under a version that the learner lost."""
    made = LeaseWindow()
    made.note_lost(b"1", "none", 0.0)
    assert len(made) == 0


@given(st.lists(st.tuples(st.sampled_from(["back", "late", "gone", "after"]), st.integers(0, 30))))
def test_the_window_counts_its_last_leases(ends):
    """Against a list that is counted anew each time."""
    made, plain = LeaseWindow(), []
    for what, number in ends * 20:
        name = b"%d" % number
        if what == "back":
            made.note_returned(name, in_time=True)
            plain.append(None)
        elif what == "after":
            made.note_returned(name, in_time=False)
            if name in plain:
                plain[plain.index(name)] = None
        else:
            made.note_lost(name, what, 1.0)
            plain.append(name)
        plain = plain[-WINDOW_LEASES:]
        assert (len(made), made.lost) == (len(plain), sum(end is not None for end in plain))
    assert not made.verdict(1.0)
    if len(plain) < LEASES_MIN:
        assert not made.verdict(0.0)
    made.clear()
    assert (len(made), made.lost) == (0, 0)
