"""The process that floods come to, under default limits: `python flood_host.py FILES`, its bound on open files.

Prints its address, then what it holds for each line of input; a file is opened for each, as a ledger would open one.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import trio

from echo2.p2p.channel import answering
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack

HOST = Identity(b"\x7c" * 32)


async def count_up(_peer, message):
    return Ack(count=message.count + 1)


async def main(files):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
    async with open_libp2p_transport(HOST, ["/ip4/127.0.0.1/tcp/0"]) as transport:
        transport.set_handler("hello", answering(Ack, count_up, lambda peer, error: None))
        print(*transport.addresses, flush=True)
        while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            with Path("/proc/self/statm").open() as file:  # noqa: ASYNC230 - of the kernel, not of a disk
                resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found = {"resident_bytes": resident, "inbound": transport.view().inbound_connections}
            print(json.dumps(found | {"handshaking": len(transport._handshaking)}), flush=True)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
