"""The process that crowds come to: `python crowd_host.py`. Prints its address, then counts for each line of input."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sized

import trio

from echo2.p2p import libp2p_yamux
from echo2.p2p.channel import answering
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack

HOST = Identity(b"\x7b" * 32)

DEPTH_MAX = 3


def counters(thing, path="transport", depth=0, seen=None):
    """Every number, and the size of every collection, that objects of ours hold: what could be left of a peer."""
    seen = set() if seen is None else seen
    if depth > DEPTH_MAX or id(thing) in seen:
        return {}
    seen.add(id(thing))
    names = {
        *getattr(thing, "__dict__", {}),
        *(n for kind in type(thing).__mro__ for n in getattr(kind, "__slots__", ())),
    }
    found = {}
    for name in names:
        value = getattr(thing, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            found[f"{path}.{name}"] = value
        elif isinstance(value, Sized) and not isinstance(value, str | bytes):
            found[f"{path}.{name}"] = len(value)
        elif type(value).__module__.startswith("echo2.p2p"):
            found |= counters(value, f"{path}.{name}", depth + 1, seen)
    return found


async def count_up(_peer, message):
    return Ack(count=message.count + 1)


async def main():
    libp2p_yamux.PING_SECONDS, libp2p_yamux.SILENT_SECONDS_MAX = 0.5, 2.0  # a hole is noticed while the test waits
    async with open_libp2p_transport(HOST, ["/ip4/127.0.0.1/tcp/0"]) as transport:
        transport.set_handler("hello", answering(Ack, count_up, lambda peer, error: None))
        print(*transport.addresses, flush=True)
        while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            gc.collect()
            tasks = trio.lowlevel.current_statistics().tasks_living
            files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            print(json.dumps({"tasks": tasks, "files": files} | counters(transport)), flush=True)


if __name__ == "__main__":
    trio.run(main)
