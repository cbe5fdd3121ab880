"""The other process of the fault tests, ours (`python fault_peers.py ROLE ARGUMENTS`), and what starts either kind.

`stock_peer.py` is its counterpart on unmended py-libp2p, under the same key and with the same protocols.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from echo2.p2p.channel import answering, request
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
BOUND_SECONDS = 60.0
"""On everything a test does with its other process: a hang fails by it."""

HERE, THERE = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
MIB = 1 << 20
STOCK = Path(__file__).with_name("stock_peer.py")


# The other process.


async def count_back(_peer, message):
    return Ack(count=message.count + 1)


async def raises(_stream):
    raise ZeroDivisionError("a mistake in a handler")


async def pour_into(stream):
    while True:
        await stream.send_all(bytes(MIB))


async def serve_ours(address):
    """`hello` (an Ack plus one), `report` (raises), `publish` (half a frame, then nothing), `receipts` (an echo),

    `chunks` (pours and reads), `leases` (holds), `rollouts` (reads after the stall told in the first byte, counts).
    """
    held = 0

    async def half(stream):
        await stream.send_all((100_000).to_bytes(4, "big") + bytes(50_000))
        print("half", flush=True)
        await trio.sleep_forever()

    async def echo(stream):
        while data := await stream.receive_some(MIB):
            await stream.send_all(data)

    async def pour(stream):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour_into, stream)
            while await stream.receive_some(MIB):
                pass
            nursery.cancel_scope.cancel()

    async def hold(_stream):
        nonlocal held
        held += 1
        print("held", held, flush=True)
        await trio.sleep_forever()

    async def stall(stream):
        await trio.sleep((await stream.receive_some(1))[0])
        total = 0
        while data := await stream.receive_some(MIB):
            total += len(data)
        await stream.send_all(str(total).encode())
        await stream.close_write()

    async with open_libp2p_transport(THERE, [address]) as transport:
        transport.set_handler("hello", answering(Ack, count_back, lambda peer, error: None))
        transport.set_handler("report", raises)
        transport.set_handler("publish", half)
        transport.set_handler("receipts", echo)
        transport.set_handler("chunks", pour)
        transport.set_handler("leases", hold)
        transport.set_handler("rollouts", stall)
        print(*transport.addresses, flush=True)
        await trio.sleep_forever()


async def cycle_ours(address, peer, times):
    """Come, ask once, leave; again and again."""
    for _ in range(int(times)):
        async with open_libp2p_transport(THERE, []) as transport:
            await request(transport, PeerAddress(peer=peer, addresses=(address,)), "hello", Ack(), Ack)
    print("cycled", flush=True)


async def send_and_leave(address, peer):
    """Send, close and exit at once."""
    async with open_libp2p_transport(THERE, []) as transport:
        stream = await transport.open(PeerAddress(peer=peer, addresses=(address,)), "chunks")
        await stream.send_all(bytes(200_000))
        await stream.close_write()


ROLES = {f.__name__: f for f in (serve_ours, cycle_ours, send_and_leave)}


# What starts it.


@asynccontextmanager
async def other(script, role, *arguments, seconds=BOUND_SECONDS):
    """The other process; killed at the end, or after so long."""
    process = await trio.lowlevel.open_process(
        [sys.executable, str(script), role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        with trio.fail_after(seconds):
            yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def ours(role, *arguments):
    return other(__file__, role, *arguments)


def stock(role, *arguments):
    return other(STOCK, role, *arguments)


async def line_of(process, start=""):
    """Its next line, or its next that starts so."""
    while True:
        text = b""
        while not text.endswith(b"\n"):
            part = await process.stdout.receive_some(1)
            assert part, f"the other process ended with {await process.wait()}"
            text += part
        found = text.decode().strip()
        if found.startswith(start):
            return found


async def tell(process):
    """Let it go on."""
    await process.stdin.send_all(b"\n")


@asynccontextmanager
async def served_by_ours(address=ANY_PORT):
    async with ours("serve_ours", address) as process:
        yield process, PeerAddress(peer=THERE.peer_id, addresses=(await line_of(process),))


@asynccontextmanager
async def served_by_stock(security="noise"):
    async with stock("serve", security) as process:
        yield process, PeerAddress(peer=THERE.peer_id, addresses=(await line_of(process),))


def resident_bytes(process):
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


def port_of(there):
    return int(there.addresses[0].rpartition("/")[2])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    trio.run(ROLES[sys.argv[1]], *sys.argv[2:])
