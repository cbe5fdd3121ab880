"""The pace of bulk on a line with a queue, by hand and against a model of one."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.line import LOOK_SECONDS, PACE_MIN, QUEUE_SECONDS_MAX, Line, Pacer, read_line, set_pace


def test_line_without_a_queue_is_left_alone():
    """A long way is no queue."""
    assert Pacer().step(Line(0.30, 0.29, 1e6)) is None


def test_pace_by_hand():
    """A queue slows to a part of what arrives, a long one to half; a short one lets go by steps, and at last wholly."""
    pacer = Pacer()
    assert pacer.step(Line(0.15, 0.02, 250_000)) == 200_000
    assert pacer.step(Line(0.60, 0.02, 250_000)) == 125_000
    assert pacer.step(Line(0.08, 0.02, 125_000)) == 125_000
    assert round(pacer.step(Line(0.03, 0.02, 125_000))) == 132_500
    for _ in range(50):
        pacer.step(Line(0.03, 0.02, 125_000))
    assert pacer.pace is None


@given(st.floats(50_000, 10e6), st.floats(0.001, 0.2), st.floats(0.2, 3.0))
def test_queue_of_any_line_is_soon_short_and_the_line_in_use(rate, way_seconds, full_seconds):
    """From a full queue, within a minute it stays near the bound, and most of the line is used."""
    pacer, queue, shares = Pacer(), rate * full_seconds, []
    for step in range(600):
        pace = pacer.step(Line(way_seconds + queue / rate, way_seconds, rate if queue else pacer.pace or rate))
        sent = (pace if pace is not None else 2 * rate) * LOOK_SECONDS
        left = queue + sent
        passed = min(left, rate * LOOK_SECONDS)
        queue = min(left - passed, rate * full_seconds)
        if step > 300:
            assert queue / rate < QUEUE_SECONDS_MAX + 2 * LOOK_SECONDS
            shares.append(passed / (rate * LOOK_SECONDS))
    assert sum(shares) / len(shares) > 0.6


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1e12))
def test_some_pace_is_always_left(round_trip, shortest, delivered):
    """Whatever the kernel says, bulk never stops."""
    pace = Pacer().step(Line(round_trip, shortest, delivered))
    assert pace is None or pace >= PACE_MIN


def test_real_socket_may_be_asked_and_told():
    """On this system the calls do nothing worse than nothing."""
    a, b = socket.socket(), socket.socket()
    with a, b:
        a.bind(("127.0.0.1", 0))
        a.listen()
        b.connect(a.getsockname())
        line = read_line(b)
        assert line is None or 0 <= line.shortest_seconds < 5
        set_pace(b, 1e6)
        set_pace(b, None)
    assert read_line(b) is None
