"""Commits that many wait for: when they are made, who shares one, and whose fault costs whom."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.coordinator.gathering import TOGETHER_MAX, Gathering
from echo2.coordinator.ledger import LedgerUnavailable
from echo2.coordinator.rhythm import PAUSE_SECONDS_MAX, PAUSE_TIMES, Rhythm


class Time:
    """The virtual clock, and what a commit takes, which no virtual clock shows."""

    spent = 0.0

    def __call__(self):
        return trio.current_time() + self.spent


class Desk:
    """Doubles numbers, in a time that it takes for each commit; -1 is its own fault, -2 breaks everything."""

    def __init__(self, commit_seconds=0.01):
        self.clock = Time()
        self.commit_seconds = commit_seconds
        self.commits = []
        self.gathering = Gathering(self.carry_out, self.clock)
        self.full = False
        self.answers = {}

    def carry_out(self, asked):
        self.clock.spent += self.commit_seconds
        if self.full:
            raise LedgerUnavailable("full")
        if -2 in asked:
            raise ZeroDivisionError
        self.commits.append(list(asked))
        return [ValueError("negative") if number < 0 else 2 * number for number in asked]

    async def ask(self, number):
        try:
            self.answers[number] = await self.gathering.ask(number)
        except Exception as error:  # noqa: BLE001 - what the asker gets is looked at
            self.answers[number] = type(error)

    async def ask_all(self, numbers):
        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(self.ask, number)


@given(took=st.floats(0, 10), began=st.floats(-1e6, 1e6))
def test_a_pause_is_many_times_what_a_commit_took_and_never_long(took, began):
    """Nothing took no time: no pause."""
    now = [began]
    rhythm = Rhythm(lambda: now[0])
    assert rhythm.pause == 0.0
    now[0] = began + took
    rhythm.made(began)
    assert rhythm.pause == pytest.approx(min(PAUSE_TIMES * (now[0] - began), PAUSE_SECONDS_MAX), abs=1e-6)
    now[0] += PAUSE_SECONDS_MAX + 1e-6
    assert rhythm.pause == 0.0


async def test_one_alone_is_carried_out_at_once(autojump_clock):
    """Without a wait, and without letting anybody else run."""
    desk = Desk()
    before = trio.current_time()
    await desk.ask(1)
    assert (desk.answers, trio.current_time()) == ({1: 2}, before)


async def test_those_behind_it_share_the_next_commit(autojump_clock):
    """In the order they came; what takes no time is never waited for."""
    desk = Desk()
    await desk.ask_all([0, 1, 2, 3, 4])
    first, second = desk.commits
    assert len(first) == 1
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert desk.answers == {number: 2 * number for number in range(5)}
    quick = Desk(commit_seconds=0.0)
    await quick.ask_all([0, 1, 2])
    assert len(quick.commits) == 3


async def test_a_commit_takes_no_more_than_so_many(autojump_clock):
    """A crowd is answered in several."""
    desk = Desk()
    await desk.ask_all(range(5 * TOGETHER_MAX))
    assert max(map(len, desk.commits)) == TOGETHER_MAX
    assert desk.answers == {number: 2 * number for number in range(5 * TOGETHER_MAX)}


async def test_a_fault_of_one_costs_the_others_nothing(autojump_clock):
    """Whether it is told apart by the desk, or breaks the whole commit."""
    desk = Desk()
    await desk.ask(7)
    await desk.ask_all([1, -1, 2, -2, 3])
    assert desk.answers == {7: 14, 1: 2, 2: 4, 3: 6, -1: ValueError, -2: ZeroDivisionError}


async def test_a_ledger_that_cannot_be_written_refuses_all_and_is_tried_once(autojump_clock):
    """Not once for each of them: that would hold everything up."""
    desk = Desk()
    await desk.ask(7)
    desk.full, spent = True, desk.clock.spent
    await desk.ask_all([1, 2, 3])
    assert [desk.answers[number] for number in (1, 2, 3)] == [LedgerUnavailable] * 3
    assert desk.clock.spent == spent + desk.commit_seconds


async def test_a_crowd_is_carried_out_in_full_commits_in_the_order_it_came(autojump_clock):
    """A thousand behind one: whoever waits does nothing meanwhile, and no commit is made for one of them alone."""
    desk = Desk()
    numbers = range(1000)
    await desk.ask(7)
    async with trio.open_nursery() as nursery:
        for number in numbers:
            nursery.start_soon(desk.ask, number)
            await trio.testing.wait_all_tasks_blocked()
    sizes = list(map(len, desk.commits[1:]))
    assert [number for commit in desk.commits[1:] for number in commit] == list(numbers)
    assert all(size == TOGETHER_MAX for size in sizes[:-1])


async def test_an_asker_that_goes_away_takes_nobody_with_it(autojump_clock):
    """The first one waits for all; its stream breaks meanwhile. What nobody waits for is not carried out."""
    desk = Desk()
    await desk.ask(7)
    async with trio.open_nursery() as nursery:
        scopes = {}

        async def ask(number):
            with trio.CancelScope() as scopes[number]:
                await desk.ask(number)

        for number in range(1, 6):
            nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
        for number in (1, 2, 4):  # who leads, who would lead next, and one of those behind
            scopes[number].cancel()
            await trio.testing.wait_all_tasks_blocked()
    assert desk.commits == [[7], [3, 5]]
    assert desk.answers == {7: 14, 3: 6, 5: 10}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_whoever_stays_is_answered_once_whatever_the_others_do(data):
    """Under any cancellations and failures: none is carried out durably twice, nobody waits for ever."""
    count = data.draw(st.integers(1, 40))
    moment = st.integers(0, 30)
    plans = data.draw(
        st.lists(
            st.tuples(moment, st.none() | moment, st.sampled_from([1, 1, 1, -1, -2])), min_size=count, max_size=count
        )
    )
    full = data.draw(st.sets(st.integers(0, 12)))
    desk, calls, durable, answers = Desk(0.004), [0], [], {}

    def carry_out(asked):
        calls[0] += 1
        desk.clock.spent += desk.commit_seconds
        if calls[0] in full:
            raise LedgerUnavailable("full")
        if any(kind == -2 for _, kind in asked):
            raise ZeroDivisionError
        durable.extend(number for number, kind in asked if kind > 0)
        return [number if kind > 0 else ValueError(number) for number, kind in asked]

    gathering = Gathering(carry_out, desk.clock)

    async def ask(number, begins, stays, kind):
        await trio.sleep(begins / 100)
        with trio.CancelScope(deadline=float("inf") if stays is None else trio.current_time() + stays / 100):
            try:
                found = await gathering.ask((number, kind))
            except (ValueError, ZeroDivisionError, LedgerUnavailable) as error:
                found = error
            answers.setdefault(number, []).append(found)

    async def main():
        with trio.fail_after(60.0):
            async with trio.open_nursery() as nursery:
                for number, (begins, stays, kind) in enumerate(plans):
                    nursery.start_soon(ask, number, begins, stays, kind)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(durable) == len(set(durable))
    for number, (_, stays, kind) in enumerate(plans):
        found = answers.get(number, [])
        assert len(found) <= 1
        assert found or stays is not None
        if found and not isinstance(found[0], Exception):
            assert found[0] == number
            assert number in durable
            assert kind > 0
        elif found:
            assert number not in durable
