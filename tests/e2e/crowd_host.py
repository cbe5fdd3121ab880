"""The process that crowds come to: `python crowd_host.py`. Prints its address, then counts for each line of input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.census import census

from echo2.p2p import libp2p_yamux
from echo2.p2p.channel import answering
from echo2.p2p.guards import TransportLimits
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack

HOST = Identity(b"\x7b" * 32)

LIMITS = TransportLimits(
    loopback_exempt=False,
    per_address_max=1000,
    per_network_max=1000,
    arrivals_per_second=1000.0,
    upload_bits_per_second=1e9,
    download_bits_per_second=1e9,
)
"""All that is counted for strangers is counted for these too, and nobody is kept out: caps on, far above the crowd."""


async def count_up(_peer, message):
    return Ack(count=message.count + 1)


async def main():
    libp2p_yamux.PING_SECONDS, libp2p_yamux.SILENT_SECONDS_MAX = 0.5, 2.0  # a hole is noticed while the test waits
    async with open_libp2p_transport(HOST, ["/ip4/127.0.0.1/tcp/0"], limits=LIMITS) as transport:
        transport.set_handler("hello", answering(Ack, count_up, lambda peer, error: None))
        print(*transport.addresses, flush=True)
        while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            tasks = trio.lowlevel.current_statistics().tasks_living
            files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            print(json.dumps({"tasks": tasks, "files": files} | census()), flush=True)


if __name__ == "__main__":
    trio.run(main)
