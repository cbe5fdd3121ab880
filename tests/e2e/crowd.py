"""Many peers in one process, which work and then vanish: `python crowd.py HOW COUNT ROUND ADDRESS PEER`.

Each connects from an address of its own, gets an answer, and leaves another request half said. Then, when told to:
`fin` and `rst` close that way, `hole` falls silent with its connection open, `kill` waits for its SIGKILL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.wire import HEADER, HELLO_LINES, SYN, client

from echo2.p2p.codec import END, encode_frame
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Ack

WAYS = ("fin", "rst", "hole", "kill")

AT_A_TIME = 8
"""Peers that connect at once: a crowd, not a flood that the kernel's queue would refuse."""


async def one(how, number, round_number, address, peer, limiter, counted, go):
    identity = Identity(bytes([7, WAYS.index(how), round_number, number % 256, number // 256]) + bytes(27))
    source = f"127.{1 + round_number}.{1 + number % 250}.{1 + WAYS.index(how)}"
    await limiter.acquire()
    async with client("protocol", int(address.rpartition("/")[2]), peer, identity, source=source) as me:
        await me.send(encode_frame(Ack(count=1)) + END)
        heard = b""
        while encode_frame(Ack(count=2)) + END not in heard:
            heard += await me.hear()
        limiter.release()
        half = HELLO_LINES["protocol"] + encode_frame(Ack(count=1))[:9]
        await me.say(HEADER.pack(0, 1, SYN, 3, 0) + HEADER.pack(0, 0, 0, 3, len(half)) + half)
        counted()
        await go.wait()
        if how in ("hole", "kill"):
            await trio.sleep_forever()
        await me.hang_up(rudely=how == "rst")


async def main(how, count, round_number, address, peer):
    """Say `ready` when all have worked; vanish on a line of input."""
    there, go, limiter = 0, trio.Event(), trio.Semaphore(AT_A_TIME)

    def counted():
        nonlocal there
        there += 1
        if there == int(count):
            print("ready", flush=True)

    async with trio.open_nursery() as nursery:
        for number in range(int(count)):
            nursery.start_soon(one, how, number, int(round_number), address, peer, limiter, counted, go)
        await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)  # one that fails ends all, in words
        go.set()
    print("gone", flush=True)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
