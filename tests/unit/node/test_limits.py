"""How much is asked for, and how long is waited."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.node.limits import BACKOFF_MOST_SECONDS, FIRST_BATCH_SAMPLES, Backoff, Rate, batch_samples


@pytest.mark.parametrize(
    ("rate", "lease_seconds", "samples_max", "expected"),
    [
        (None, None, 1024, FIRST_BATCH_SAMPLES),
        (None, None, 4, 4),
        (10.0, None, 1024, 40),
        (10.0, 8.0, 1024, 20),
        (1000.0, 60.0, 256, 256),
        (0.01, 60.0, 256, 1),
        (0.15, 600.0, 256, FIRST_BATCH_SAMPLES),
        (0.05, 600.0, 256, 7),
    ],
)
def test_a_batch_fits_its_time_and_a_quarter_of_a_lease(rate, lease_seconds, samples_max, expected):
    """Rate x 4 seconds, or a first batch on a slow machine; within a quarter of the lease and the owner's limit."""
    got = batch_samples(rate, batch_seconds=4.0, lease_seconds=lease_seconds, samples_max=samples_max)
    assert got == expected


def test_a_rate_follows_what_is_measured():
    """The first measure counts whole, later ones with weight 0.3."""
    rate = Rate()
    rate.measured(10, 1.0)
    assert rate.per_second == 10
    rate.measured(40, 2.0)
    assert rate.per_second == pytest.approx(13)


@given(st.integers(), st.integers(1, 60), st.one_of(st.none(), st.floats(0, 100)))
def test_pauses_grow_stay_bounded_and_respect_the_peer(seed, failures, at_least):
    """Never above half a minute beyond what was asked, never below it; a success starts anew."""
    backoff = Backoff(random.Random(seed))
    pauses = [backoff.next(at_least) for _ in range(failures)]
    low = at_least or 0.0
    assert all(low <= pause <= low + BACKOFF_MOST_SECONDS for pause in pauses)
    backoff.reset()
    assert backoff.next() <= 0.5
