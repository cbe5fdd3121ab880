"""How many small frames a connection may send."""

from __future__ import annotations

from echo2.p2p.frame_budget import (
    BYTES_PER_SMALL_FRAME,
    SMALL_FRAMES_BURST,
    SMALL_FRAMES_PER_SECOND,
    FrameBudget,
)


def test_a_burst_then_a_rate():
    """The burst is there at once; what it took comes back by the second; one more is too many."""
    budget = FrameBudget(0.0)
    assert budget.spend(SMALL_FRAMES_BURST, 0, 0.0)
    assert not budget.spend(1, 0, 0.0)
    budget = FrameBudget(0.0)
    assert budget.spend(SMALL_FRAMES_BURST, 0, 0.0)
    assert budget.spend(int(SMALL_FRAMES_PER_SECOND), 0, 1.0)
    assert not budget.spend(2, 0, 1.0)


def test_bytes_moved_pay_for_small_frames():
    """One small frame for so many bytes either way costs nothing, for ever; more than that does."""
    budget = FrameBudget(0.0)
    for _ in range(1000):
        assert budget.spend(1000, 1000 * BYTES_PER_SMALL_FRAME, 0.0)
    assert budget.spend(SMALL_FRAMES_BURST, 0, 0.0)
    assert not budget.spend(1, BYTES_PER_SMALL_FRAME // 2, 0.0)


def test_bytes_are_not_saved_up():
    """Gigabytes moved yesterday allow no flood today."""
    budget = FrameBudget(0.0)
    assert budget.spend(0, 1 << 40, 0.0)
    assert not budget.spend(SMALL_FRAMES_BURST + 1, 0, 0.0)
