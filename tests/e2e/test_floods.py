"""Connections by the hundred from this machine, which no cap per address counts: honest peers are served all along."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from e2e.fault_peers import HERE, MIB, line_of, other, tell
from e2e.flood_host import HOST
from fuzz.wire import client

from echo2.p2p.channel import request
from echo2.p2p.guards import TransportLimits
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress

pytestmark = pytest.mark.e2e

FLOOD = 500
AT_A_TIME = 50
ROOM_FILES = 4096
BOUND_SECONDS = 300.0
MEMORY_BYTES_EACH = MIB // 4
"""More than a connection takes that has said little; what it might make us hold is bounded by what is read of it."""


@asynccontextmanager
async def host(files):
    with trio.fail_after(BOUND_SECONDS):
        async with other(Path(__file__).with_name("flood_host.py"), str(files), seconds=BOUND_SECONDS) as process:
            yield process, PeerAddress(peer=HOST.peer_id, addresses=(await line_of(process),))


async def holding(process):
    await tell(process)
    return json.loads(await line_of(process))


async def served(there):
    """A peer that has never been here connects, asks and is answered."""
    async with open_libp2p_transport(HERE, []) as transport:
        assert (await request(transport, there, "hello", Ack(count=1), Ack)).count == 2


@asynccontextmanager
async def flood(level, count, there):
    """So many connections at a level, all at once; what the other end does to them is its own affair."""
    port = int(there.addresses[0].rpartition("/")[2])
    limiter, tried = trio.Semaphore(AT_A_TIME), 0
    all_tried = trio.Event()

    async def one(number):
        nonlocal tried
        async with AsyncExitStack() as stack:
            try:
                async with limiter:
                    identity = Identity(number.to_bytes(32, "big"))
                    await stack.enter_async_context(client(level, port, there.peer, identity))
            except Exception:  # noqa: BLE001 - refused, in whatever words libp2p has for it
                pass
            tried += 1
            if tried == count:
                all_tried.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number + 1)
        await all_tried.wait()
        yield
        nursery.cancel_scope.cancel()


async def test_five_hundred_sockets_that_say_nothing_keep_nobody_out():
    """Beyond the handshakes that may be going on the oldest goes; a peer comes in, and little memory is held."""
    async with host(ROOM_FILES) as (process, there):
        await served(there)
        before = await holding(process)
        async with flood("port", FLOOD, there):
            await served(there)
            during = await holding(process)
            assert during["handshaking"] <= TransportLimits().handshakes_max
            assert during["resident_bytes"] < before["resident_bytes"] + FLOOD * MEMORY_BYTES_EACH
            await served(there)


@pytest.mark.slow
async def test_five_hundred_strangers_that_prove_a_key_and_idle_keep_nobody_out():
    """They fit below the cap; a peer is served beside them, and what they hold together is bounded."""
    async with host(ROOM_FILES) as (process, there):
        await served(there)
        before = await holding(process)
        async with flood("yamux", FLOOD, there):
            await served(there)
            during = await holding(process)
            print(f"{FLOOD} idle connections: {(during['resident_bytes'] - before['resident_bytes']) / MIB:.0f} MiB")
            assert during["inbound"] >= FLOOD
            assert during["resident_bytes"] < before["resident_bytes"] + FLOOD * MEMORY_BYTES_EACH


@pytest.mark.parametrize(
    ("level", "count"),
    [pytest.param("port", FLOOD, id="silent"), pytest.param("yamux", FLOOD, id="idle", marks=pytest.mark.slow)],
)
async def test_a_process_with_few_open_files_keeps_some_for_itself(level, count):
    """More connections than it may have files: it can still open one, and a peer is let in when it comes again."""
    async with host(320) as (process, there):
        await served(there)
        async with flood(level, count, there):
            during = await holding(process)
            assert during["inbound"] <= 320 - 256
            async with open_libp2p_transport(HERE, []) as transport:
                for attempt in range(10):
                    try:
                        assert (await request(transport, there, "hello", Ack(count=1), Ack)).count == 2
                        break
                    except Exception:  # noqa: BLE001 - whoever is refused finds its place when it comes again
                        assert attempt < 9
