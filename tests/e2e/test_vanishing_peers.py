"""Peers that connect, work and vanish in every way leave nothing behind: no task, no file handle, no count."""

from __future__ import annotations

import functools
import json
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from e2e.census import census
from e2e.crowd import WAYS
from e2e.crowd_host import HOST
from e2e.fault_peers import HERE, line_of, other, tell

from echo2.p2p.channel import request
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress
from echo2.p2p.rates import THROUGHPUT_MARKS

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).parent

SETTLE_SECONDS = 600.0
"""Far above the two seconds after which a silent peer is given up, on any machine; a leak is there for ever."""

RESTS = 8

ONLY_RISE = frozenset(
    {
        "sum of echo2.p2p.rates.Limiter.passed_bytes",  # what is shown as the traffic so far
        "sum of echo2.p2p.rates.Turns._order",  # numbers the turns
        "sum of echo2.p2p.libp2p_yamux.Yamux.heard_bytes",  # these of the honest peer's connection, which stays:
        "sum of echo2.p2p.libp2p_yamux.Yamux._ping_value",
        "sum of echo2.p2p.libp2p_yamux.Yamux._last_remote_id",
        "sum of echo2.p2p.libp2p_stream.YamuxStream.stream_id",
    }
)
"""Single numbers that count up and hold nothing. Everything else has to come back to what it was."""

MARKS_MAX = 2 * (THROUGHPUT_MARKS + 2)
ASKED_MAX = 32
"""Requests of the honest peer in a whole test, with room: two a round."""

MAY_GROW_BY = {
    "items in echo2.p2p.rates.Throughput._marks": MARKS_MAX,
    "items in every collections.deque": MARKS_MAX,
    "items in echo2.p2p.libp2p_yamux.Yamux._parting": ASKED_MAX,
    "items in every dict": ASKED_MAX,
}
"""The totals of the last seconds, from which the two rates shown are computed: of the process, not of its peers. And
the streams that the honest peer's own connection ended, which it remembers (1,024 of them): one for each time it asks.
"""


@asynccontextmanager
async def crowd_host():
    async with other(FOLDER / "crowd_host.py", "", seconds=3600.0) as process:
        yield process, PeerAddress(peer=HOST.peer_id, addresses=(await line_of(process),))


async def counts_of(process):
    await tell(process)
    found = json.loads(await line_of(process))
    return {name: count for name, count in found.items() if name not in ONLY_RISE}


def left_over(before, after):
    """(before, after) by name of all there is more of."""
    return {
        name: (before.get(name, 0), count)
        for name, count in after.items()
        if count > before.get(name, 0) + MAY_GROW_BY.get(name, 0)
    }


@asynccontextmanager
async def come_and_vanish(there, each, round_number):
    """A crowd of `each` for every way, all there at once; inside the context they have vanished."""
    async with AsyncExitStack() as stack:
        crowds = {}
        for way in WAYS:
            arguments = (way, str(each), str(round_number), *there.addresses, there.peer)
            crowds[way] = await stack.enter_async_context(other(FOLDER / "crowd.py", *arguments, seconds=3600.0))
        for process in crowds.values():
            assert await line_of(process) == "ready"
        for way, process in crowds.items():
            if way == "kill":
                process.kill()
            else:
                await tell(process)
        yield  # the silent ones are still connected, as far as their kernel knows


async def until_nothing_is_left(host, before, *, names=None):
    """Wait until all counts (or those of `names`) are back at `before`; fails with those that are not."""
    left = {"": (0, 0)}
    with trio.move_on_after(SETTLE_SECONDS):
        while left:
            await trio.sleep(0.3)
            after = await counts_of(host)
            left = left_over(before, {name: after[name] for name in names or after})
    assert not left


async def at_rest(host):
    """The highest of several counts, taken once they no longer fall: a ping may be on its way in any of them."""
    found, before = await counts_of(host), {}
    with trio.fail_after(SETTLE_SECONDS):
        while not before or left_over(found, before):
            await trio.sleep(0.3)
            found, before = await counts_of(host), found
    for _ in range(RESTS):
        after = await counts_of(host)
        found = {name: max(found.get(name, 0), after.get(name, 0)) for name in found | after}
    return found


async def leave_nothing(host, there, here, *, each, rounds):
    async def ask():
        assert (await request(here, there, "hello", Ack(count=41), Ack)).count == 42

    await ask()
    first = await at_rest(host)
    async with come_and_vanish(there, 1, 0):  # the first of each way loads modules and fills caches, once and for all
        await ask()
        await until_nothing_is_left(host, first, names=("tasks", "files"))
    before = await at_rest(host)
    for round_number in range(1, 1 + rounds):
        async with come_and_vanish(there, each, round_number):
            await ask()
            await until_nothing_is_left(host, before)
        await ask()


async def test_a_small_crowd_leaves_nothing_behind():
    """Three peers of each way: closed, reset, killed, silent; the honest peer beside them is answered throughout."""
    async with crowd_host() as (host, there), open_libp2p_transport(HERE, []) as here:
        await leave_nothing(host, there, here, each=3, rounds=1)


def forget_nothing_in_an_object(kept):
    kept.attribute.append(b"peer")


def forget_nothing_in_a_closure(kept):
    kept.closure(b"peer")


def forget_nothing_in_a_task(kept):
    kept.nursery.start_soon(trio.sleep_forever)


def forget_nothing_in_a_cache(kept):
    kept.cached(object())


def forget_nothing_in_a_number(kept):
    kept.places += 1


class Kept:
    """Where a peer may be forgotten."""

    __module__ = "echo2.p2p.of_a_test"

    def __init__(self, nursery):
        behind: dict[int, bytes] = {}

        def closure(peer):
            behind[len(behind)] = peer

        self.attribute: list[bytes] = []
        self.closure = closure
        self.nursery = nursery
        self.cached = functools.lru_cache(lambda thing: None)
        self.places = 0


@pytest.mark.parametrize(
    "forget",
    [
        forget_nothing_in_an_object,
        forget_nothing_in_a_closure,
        forget_nothing_in_a_task,
        forget_nothing_in_a_cache,
        forget_nothing_in_a_number,
    ],
)
async def test_the_census_sees_one_peer_that_was_not_forgotten(forget, nursery):
    """One entry in an attribute, in a variable of a function, in a cache, one task, one count: each is seen."""
    kept = Kept(nursery)
    forget(kept)
    await trio.testing.wait_all_tasks_blocked()
    json.dumps(census())
    before = json.dumps(census())  # a text is no object that the next census counts
    assert not left_over(json.loads(before), json.loads(json.dumps(census())))
    forget(kept)
    await trio.testing.wait_all_tasks_blocked()
    after = census()
    assert left_over(json.loads(before), after)


@pytest.mark.slow
async def test_three_hundred_peers_ten_times_over_leave_nothing_behind():
    """75 peers of each way at once, ten times over, and after each time all counts are what they were."""
    async with crowd_host() as (host, there), open_libp2p_transport(HERE, []) as here:
        await leave_nothing(host, there, here, each=75, rounds=10)
