"""A slow line: a TCP proxy whose connections share a rate each way. `python line.py TO_PORT BYTES_PER_SECOND`.

First come, first served in pieces of a packet or so, and short queues: what a home router with fair queueing does.
"""

from __future__ import annotations

import socket
import sys

import trio

PIECE_BYTES = 1500
QUEUE_BYTES = 16 * 1024
"""Asked of the kernel for each socket's buffers: what queues here is delay that no protocol could avoid."""


class Line:
    """One direction's rate; the lock's waiting line is the router's queue."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._turn = trio.Lock()

    async def carry(self, count: int) -> None:
        async with self._turn:
            await trio.sleep(count / self._rate)


async def main(to_port: str, bytes_per_second: str) -> None:
    """Serve until killed; prints the port."""
    up, down = Line(float(bytes_per_second)), Line(float(bytes_per_second))

    async def pump(source: trio.SocketStream, sink: trio.SocketStream, line: Line) -> None:
        while data := await source.receive_some(PIECE_BYTES):
            await line.carry(len(data))
            await sink.send_all(data)
        await sink.send_eof()

    async def proxy(near: trio.SocketStream) -> None:
        raw = trio.socket.socket()
        for one in (raw, near.socket):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
        await raw.connect(("127.0.0.1", int(to_port)))
        far = trio.SocketStream(raw)
        try:
            async with near, far, trio.open_nursery() as nursery:
                nursery.start_soon(pump, near, far, up)
                nursery.start_soon(pump, far, near, down)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    for listener in listeners:
        listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)
    print(listeners[0].socket.getsockname()[1], flush=True)
    await trio.serve_listeners(proxy, listeners)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
