"""What a refusal may ask of whoever was refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.errors import RETRY_SECONDS_MAX, Refused


@given(st.none() | st.floats(0, 1e9))
def test_no_refusal_keeps_anyone_waiting_beyond_the_bound(said):
    """A time below the bound is taken as it was said, one above it is cut, and none stays none."""
    heard = Refused("busy", "come again", said).retry_seconds
    assert heard == (None if said is None else min(said, RETRY_SECONDS_MAX))
