"""Peers that connect, work and vanish in every way leave nothing behind: no task, no file handle, no count."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from e2e.crowd import WAYS
from e2e.crowd_host import HOST
from e2e.fault_peers import HERE, line_of, other, tell

from echo2.p2p.channel import request
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).parent

SETTLE_SECONDS = 60.0
"""Far above the two seconds after which a silent peer is given up; a leak is there for ever."""

REMEMBERED = ("backoff", "bans", "token", "bucket", "rate", "history", "tried", "since", "passed_bytes")
"""Names of what is meant to outlast a peer, or moves by itself."""


@asynccontextmanager
async def crowd_host():
    async with other(FOLDER / "crowd_host.py", "", seconds=1200.0) as process:
        yield process, PeerAddress(peer=HOST.peer_id, addresses=(await line_of(process),))


async def counts_of(process):
    await tell(process)
    found = json.loads(await line_of(process))
    return {name: count for name, count in found.items() if not any(word in name.lower() for word in REMEMBERED)}


@asynccontextmanager
async def come_and_vanish(there, each, round_number):
    """A crowd of `each` for every way, all there at once; inside the context they have vanished."""
    async with AsyncExitStack() as stack:
        crowds = {}
        for way in WAYS:
            arguments = (way, str(each), str(round_number), *there.addresses, there.peer)
            crowds[way] = await stack.enter_async_context(other(FOLDER / "crowd.py", *arguments, seconds=300.0))
        for process in crowds.values():
            assert await line_of(process) == "ready"
        for way, process in crowds.items():
            if way == "kill":
                process.kill()
            else:
                await tell(process)
        yield  # the silent ones are still connected, as far as their kernel knows


async def settled(host):
    """The counts, once they have stopped to change: the last answer's own stream is gone."""
    found = None
    while found != (found := await counts_of(host)):  # noqa: ASYNC110 - the other side has no event to wait on
        await trio.sleep(0.3)
    return found


async def leave_nothing(host, there, here, *, each, rounds):
    async def ask():
        assert (await request(here, there, "hello", Ack(count=41), Ack)).count == 42

    await ask()
    before = await settled(host)
    for round_number in range(rounds):
        async with come_and_vanish(there, each, round_number):
            await ask()
            left = {"": (0, 0)}
            with trio.move_on_after(SETTLE_SECONDS):
                while left:
                    await trio.sleep(0.3)
                    after = await counts_of(host)
                    left = {name: (before.get(name, 0), n) for name, n in after.items() if n > before.get(name, 0)}
        assert not left
        await ask()


async def test_a_small_crowd_leaves_nothing_behind():
    """Three peers of each way: closed, reset, killed, silent; the honest peer beside them is answered throughout."""
    async with crowd_host() as (host, there), open_libp2p_transport(HERE, []) as here:
        await leave_nothing(host, there, here, each=3, rounds=1)


@pytest.mark.slow
async def test_three_hundred_peers_ten_times_over_leave_nothing_behind():
    """75 peers of each way at once, ten times over, and after each time all counts are what they were."""
    async with crowd_host() as (host, there), open_libp2p_transport(HERE, []) as here:
        await leave_nothing(host, there, here, each=75, rounds=10)
