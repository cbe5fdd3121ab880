"""Token bucket, turns and limiter: exact by hand, within bounds under any history, under a virtual clock as a whole."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.rates import GRANT_BYTES_MIN, THROUGHPUT_MARKS, Limiter, Throughput, TokenBucket, Turn, Turns

MBIT = 1_000_000


def test_bucket_by_hand():
    """A full bucket lets its burst pass, then its rate; a debt is paid back first."""
    bucket = TokenBucket(100, 50, 0.0)
    assert bucket.tokens(0.0) == 50
    bucket.spend(80, 0.0)
    assert bucket.tokens(0.0) == -30
    assert bucket.seconds_until(20, 0.0) == pytest.approx(0.5)
    assert bucket.tokens(0.5) == pytest.approx(20)
    assert bucket.tokens(100.0) == 50
    assert bucket.seconds_until(1000, 100.0) == 0  # more than the burst: a full bucket is enough


def test_bucket_bears_a_clock_that_goes_back():
    """Time that runs backwards gives nothing and takes nothing."""
    bucket = TokenBucket(100, 50, 10.0)
    bucket.spend(50, 10.0)
    assert bucket.tokens(5.0) == 0
    assert bucket.tokens(5.5) == pytest.approx(50)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1)])
def test_bucket_without_a_rate_is_a_mistake(rate, burst):
    """A rate of nothing would wait for ever."""
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(rate, burst, 0.0)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 60)), min_size=1, max_size=100))
def test_bucket_never_lets_more_pass_than_rate_and_burst(steps):
    """However the asking is timed, no more passes than the burst and what the rate gave since."""
    bucket, now, passed = TokenBucket(100, 60, 0.0), 0.0, 0
    for pause, count in steps:
        now += pause
        if bucket.seconds_until(count, now) == 0:
            bucket.spend(count, now)
            passed += count
        assert passed <= 60 + 100 * now + 1e-6


def served(streams, rounds):
    """Bytes each connection got; each asks again at once, for 10 bytes a stream."""
    turns, got = Turns(), Counter()
    for key, weight in streams.items():
        turns.ask(Turn(key, 10 * weight, weight, lambda: None))
    for _ in range(rounds):
        turn = turns.take()
        got[turn.key] += turn.count
        turns.ask(Turn(turn.key, turn.count, turn.weight, lambda: None))
    return got


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20), min_size=2))
def test_turns_are_fair_to_streams(streams):
    """A connection with n streams gets n times what one with a single stream gets."""
    got = served(streams, 50 * len(streams))
    each = [got[key] / weight for key, weight in streams.items()]
    assert max(each) - min(each) <= 10


def test_newcomer_does_not_wait_for_a_backlog_nor_profit_from_its_silence():
    """Whoever asks for the first time is next but one; then it takes turns like all others."""
    turns = Turns()
    for _ in range(1000):
        turns.ask(Turn("bulk", 100, 1, lambda: None))
    for _ in range(10):
        turns.take()
    turns.ask(Turn("small", 10, 1, lambda: None))
    assert "small" in [turns.take().key for _ in range(2)]
    turns.ask(Turn("small", 100, 1, lambda: None))
    turns.ask(Turn("small", 100, 1, lambda: None))
    assert [turns.take().key for _ in range(4)].count("bulk") >= 2


def test_dropped_turn_is_passed_over():
    """Who no longer wants its turn holds up nobody."""
    turns = Turns()
    first, second = (Turn(key, 10, 1, lambda: None) for key in "ab")
    turns.ask(first)
    turns.ask(second)
    first.dropped = True
    assert turns.peek() is second
    turns.take()
    assert turns.peek() is None


async def receive_forever(limiter, key, weight, passed):
    """What a receiving connection does with a limiter."""
    while True:
        await limiter.pay(key, limiter.grant_bytes, weight)
        passed[key].append((trio.current_time(), limiter.grant_bytes))


def bytes_between(passed, begin, end):
    return sum(count for entries in passed.values() for at, count in entries if begin <= at < end)


@pytest.mark.parametrize("mbit", [0.5, 2, 50])
async def test_cap_is_kept_within_five_percent_of_any_ten_seconds(autojump_clock, nursery, mbit):
    """Ten connections that always want more get the cap together, in every window of ten seconds."""
    limiter = Limiter(mbit * MBIT)
    passed = {n: [] for n in range(10)}
    nursery.start_soon(limiter.run)
    for key in passed:
        nursery.start_soon(receive_forever, limiter, key, 1, passed)
    await trio.sleep(30)
    nursery.cancel_scope.cancel()
    wanted = mbit * MBIT / 8 * 10
    for begin in range(20):
        assert 0.95 * wanted <= bytes_between(passed, begin, begin + 10) <= 1.05 * wanted
    assert limiter.passed_bytes == pytest.approx(mbit * MBIT / 8 * 30, rel=0.03)


async def test_cap_holds_after_silence_and_with_control_frames(autojump_clock, nursery):
    """Control frames pass at once and are paid for by what comes after them."""
    limiter = Limiter(2 * MBIT)
    passed = {0: []}
    nursery.start_soon(limiter.run)
    await trio.sleep(100)
    start = trio.current_time()
    nursery.start_soon(receive_forever, limiter, 0, 1, passed)
    for _ in range(100):
        limiter.count(1000)
        await trio.sleep(0.1)
    nursery.cancel_scope.cancel()
    total = 100 * 1000 + bytes_between(passed, start, start + 10)
    assert 0.95 * 2.5e6 <= total <= 1.05 * 2.5e6


async def test_streams_share_the_cap_whatever_connection_they_are_on(autojump_clock, nursery):
    """One connection with nine streams and nine with one each: every stream gets the same."""
    limiter = Limiter(2 * MBIT)
    passed = {n: [] for n in range(10)}
    nursery.start_soon(limiter.run)
    for key in passed:
        nursery.start_soon(receive_forever, limiter, key, 9 if key == 0 else 1, passed)
    await trio.sleep(60)
    nursery.cancel_scope.cancel()
    each = {key: bytes_between({key: passed[key]}, 0, 60) / (9 if key == 0 else 1) for key in passed}
    assert max(each.values()) / min(each.values()) < 1.1


async def test_small_request_waits_for_one_grant(autojump_clock, nursery):
    """Beside bulk that always wants more, a control connection's bytes pass within a tenth of a second."""
    limiter = Limiter(2 * MBIT)
    passed = {n: [] for n in range(3)}
    nursery.start_soon(limiter.run)
    for key in passed:
        nursery.start_soon(receive_forever, limiter, key, 1, passed)
    for _ in range(50):
        await trio.sleep(0.37)
        start = trio.current_time()
        await limiter.pay("control", 500, 4)
        assert trio.current_time() - start < 0.1
    nursery.cancel_scope.cancel()


async def test_unused_turn_is_given_back(autojump_clock, nursery):
    """What was granted and not used counts for nobody."""
    limiter = Limiter(2 * MBIT)
    nursery.start_soon(limiter.run)
    granted = trio.Event()
    turn = limiter.ask("a", 5000, 1, granted.set)
    await granted.wait()
    limiter.settle(turn, 1000)
    assert limiter.passed_bytes == 1000
    waiting = limiter.ask("b", 1000, 1, lambda: None)
    limiter.settle(waiting, 0)
    await trio.sleep(1)
    assert (waiting.granted, limiter.passed_bytes) == (False, 1000)
    nursery.cancel_scope.cancel()


async def test_without_a_cap_nothing_waits():
    """No cap: everything passes at once, and is counted."""
    limiter = Limiter(None)
    await limiter.run()
    await limiter.pay("a", 10**9, 1)
    assert limiter.ask("a", 5, 1, lambda: None).granted
    limiter.count(1)
    assert limiter.passed_bytes == 10**9 + 6


def test_smallest_cap_still_moves():
    """A cap of a few kbit/s grants at least something at a time."""
    assert Limiter(8000, clock=lambda: 0.0).grant_bytes == GRANT_BYTES_MIN


def test_throughput_by_hand():
    """Bits a second over the last ten seconds, older ones forgotten; nothing is known in the first instant."""
    rate = Throughput()
    assert rate.bits_per_second(0, 0.0) == 0
    rate.note(0, 0.0)
    assert rate.bits_per_second(0, 0.0) == 0
    for second in range(1, 21):
        rate.note(1000 * min(second, 10), float(second))
    assert rate.bits_per_second(10_000, 20.0) == 0
    rate.note(15_000, 21.0)
    assert rate.bits_per_second(15_000, 21.0) == pytest.approx(8 * 5000 / 10)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 10**9)), max_size=300))
def test_throughput_keeps_few_marks_and_is_never_negative(steps):
    """However often it is told, and however long it is not."""
    rate, now, total = Throughput(), 0.0, 0
    for pause, count in steps:
        now, total = now + pause, total + count
        rate.note(total, now)
        assert rate.bits_per_second(total, now) >= 0
        assert len(rate._marks) <= THROUGHPUT_MARKS + 2
