"""The chunks that are still in memory."""

from __future__ import annotations

from echo2.p2p.recent_chunks import RecentChunks

A, B = b"a" * 32, b"b" * 32


def test_the_oldest_go_for_the_newest():
    """No more than the bound is held, and what is held is the newest."""
    recent = RecentChunks(bytes_max=10)
    for index in range(4):
        recent.keep(A, index, bytes(4))
    assert len(recent) == 2
    assert recent.get(A, [2, 3]) == [bytes(4)] * 2
    assert recent.get(A, [1, 2]) is None


def test_a_chunk_that_comes_twice_counts_once():
    """Two sources may deliver the same chunk at once."""
    recent = RecentChunks(bytes_max=10)
    for _ in range(5):
        recent.keep(A, 0, bytes(4))
    recent.keep(A, 1, bytes(6))
    assert recent.get(A, [0, 1]) == [bytes(4), bytes(6)]


def test_a_chunk_above_the_bound_is_not_held():
    """One that fits alone nowhere leaves nothing behind."""
    recent = RecentChunks(bytes_max=10)
    recent.keep(A, 0, bytes(11))
    assert len(recent) == 0
    recent.keep(A, 1, bytes(10))
    assert recent.get(A, [1]) == [bytes(10)]


def test_a_discarded_snapshot_leaves_nothing():
    """Its room is free for others at once."""
    recent = RecentChunks(bytes_max=10)
    recent.keep(A, 0, bytes(4))
    recent.keep(B, 0, bytes(6))
    recent.drop(A)
    assert recent.get(A, [0]) is None
    recent.keep(B, 1, bytes(4))
    assert recent.get(B, [0, 1]) == [bytes(6), bytes(4)]
