"""A hostile client for each layer of the wire: it speaks properly up to a level, then says whatever the case holds.

| level     | properly so far                                   | then raw bytes                        |
|-----------|---------------------------------------------------|---------------------------------------|
| port      | TCP                                               | on the port                           |
| noise     | multistream-select agreed on Noise                | in place of Noise handshake messages  |
| frames    | the Noise handshake                               | in place of encrypted Noise messages  |
| secured   | the Noise handshake                               | encrypted, in place of muxer choice   |
| yamux     | yamux agreed                                      | encrypted, in place of yamux frames   |
| stream    | a yamux stream opened                             | in place of multistream-select on it  |
| protocol  | the stream's protocol agreed                      | in place of a message                 |
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, get_args

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport as NoiseTransport

from echo2.p2p.identity import Identity

Level = Literal["port", "noise", "frames", "secured", "yamux", "stream", "protocol"]
LEVELS: tuple[Level, ...] = get_args(Level)

HEADER = struct.Struct(">BBHII")
SYN = 1


def line(text: str) -> bytes:
    """One line of multistream-select."""
    data = text.encode() + b"\n"
    return bytes([len(data)]) + data


HELLO_LINES = {
    "noise": line("/multistream/1.0.0") + line("/noise"),
    "yamux": line("/multistream/1.0.0") + line("/yamux/1.0.0"),
    "protocol": line("/multistream/1.0.0") + line("/echo2/hello/1"),
    "hold": line("/multistream/1.0.0") + line("/echo2/leases/1"),
}


class Tcp(ReadWriteCloser):
    """A socket as libp2p's Noise wants it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._buffer = b""

    async def read(self, n: int | None = None) -> bytes:
        wanted = n or 1
        while len(self._buffer) < wanted:
            data = await self.stream.receive_some(1 << 16)
            if not data:
                raise EOFError
            self._buffer += data
        taken, self._buffer = self._buffer[:wanted], self._buffer[wanted:]
        return taken

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def close(self) -> None:
        await self.stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


class Client:
    """A connection at some level; `send` says bytes there, `drain` reads until the other end is done with us."""

    def __init__(self, tcp: Tcp, secured: Any, prefix: bytes) -> None:
        self.tcp = tcp
        self._secured = secured
        self._prefix = prefix

    async def send(self, data: bytes) -> None:
        """Say bytes where the level has them."""
        prefix, self._prefix = self._prefix, b""
        if self._secured is None:
            await self.tcp.write(data)
            return
        if prefix == b"STREAM":
            data = HEADER.pack(0, 1, SYN, 1, 0) + HEADER.pack(0, 0, 0, 1, len(data)) + data
        elif prefix:
            whole = prefix + data
            data = HEADER.pack(0, 1, SYN, 1, 0) + HEADER.pack(0, 0, 0, 1, len(whole)) + whole
        for start in range(0, len(data), 60_000):
            await self._secured.write(data[start : start + 60_000])

    async def say(self, frames: bytes) -> None:
        """Further yamux frames, whatever the level."""
        await self._secured.write(frames)

    async def hear(self) -> bytes:
        """The next bytes at the level."""
        heard: bytes = await self._secured.read()
        return heard

    async def hang_up(self, *, rudely: bool) -> None:
        """End the connection, by RST or by FIN."""
        if rudely:
            self.tcp.stream.socket.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER 0: close sends RST
        await trio.aclose_forcefully(self.tcp.stream)


@asynccontextmanager
async def client(
    level: Level, port: int, target: str, identity: Identity, *, source: str | None = None
) -> AsyncIterator[Client]:
    """Connect (from `source`) and speak properly up to `level`. Raises whatever a refusal makes libp2p raise."""
    stream = await trio.open_tcp_stream("127.0.0.1", port, local_address=source)
    tcp = Tcp(stream)
    try:
        yield await climb(level, tcp, target, identity)
    finally:
        await trio.aclose_forcefully(stream)


async def climb(level: Level, tcp: Tcp, target: str, identity: Identity) -> Client:
    """Speak properly up to `level` over a byte stream."""
    if level == "port":
        return Client(tcp, None, b"")
    await tcp.write(HELLO_LINES["noise"])
    await tcp.read(len(HELLO_LINES["noise"]))
    if level == "noise":
        return Client(tcp, None, b"")
    noise = NoiseTransport(create_new_key_pair(identity.seed), noise_privkey=create_noise_key_pair().private_key)
    secured = await noise.secure_outbound(RawConnection(tcp, True), ID.from_base58(target))
    if level == "frames":
        return Client(tcp, None, b"")
    if level == "secured":
        return Client(tcp, secured, b"")
    await secured.write(HELLO_LINES["yamux"])
    heard = b""
    while len(heard) < len(HELLO_LINES["yamux"]):
        heard += await secured.read(len(HELLO_LINES["yamux"]) - len(heard))
    prefix = {"yamux": b"", "stream": b"STREAM", "protocol": HELLO_LINES["protocol"]}[level]
    return Client(tcp, secured, prefix)
