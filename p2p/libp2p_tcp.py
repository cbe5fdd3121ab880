"""TCP under libp2p's Noise: listening sockets, dialling, and a buffered byte stream.

py-libp2p 0.8.1's own TCP transport is not used, for these faults of its:
- It listens with SO_REUSEPORT and swallows the error, so a busy port gives no error and two processes can share one.
  Here a busy port is a ConfigurationError (`listen`).
- Its swarm keeps a limiter token and a task for every connection until shutdown, so after 250 inbound connections a
  host is deaf. Here whoever accepts a connection owns it and ends with it (`libp2p_transport`).
- Its `read_exactly` gives up after 100 short reads, which small TCP segments reach. Here a read waits for all it asked.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from multiaddr.exceptions import ProtocolLookupError
from multiaddr.utils import get_thin_waist_addresses

from .errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

READ_BYTES = 256 * 1024
"""Read from the socket at once: 4 Noise messages. Unbuffered 64 KiB reads cost a third of the throughput."""

BACKLOG = 128
"""Connections the kernel may hold for us; more dial again."""

_HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")


class HostPort(NamedTuple):
    """Where a multiaddr of ours leads."""

    host: str
    port: int


def parse_address(address: str) -> HostPort:
    """`/ip4/1.2.3.4/tcp/4001`, `/ip6/...`, `/dns/...`. Raises ValueError; addresses are foreign."""
    try:
        parsed = Multiaddr(address)
        names = [protocol.name for protocol in parsed.protocols()]
        port = int(parsed.value_for_protocol("tcp") or "")
        host = next((parsed.value_for_protocol(name) for name in _HOST_PROTOCOLS if name in names), None)
    except (MultiaddrError, ProtocolLookupError, ValueError, UnicodeError) as error:
        raise ValueError(f"{address!r} is not an address such as /ip4/192.0.2.1/tcp/4001") from error
    if host is None or len(names) != 2 or names[1] != "tcp":
        raise ValueError(f"{address!r} is not an address such as /ip4/192.0.2.1/tcp/4001")
    return HostPort(host, port)


async def listen(addresses: Sequence[str]) -> list[trio.SocketListener]:
    """Listening sockets for all addresses, or none and a ConfigurationError that names the one at fault."""
    listeners: list[trio.SocketListener] = []
    try:
        for address in addresses:
            try:
                host, port = parse_address(address)
                listeners += await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
            except ValueError as error:
                raise ConfigurationError(f"cannot listen: {error}") from error
            except OSError as error:
                raise ConfigurationError(_why_not(address, error)) from error
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


def listening_addresses(listeners: Sequence[trio.SocketListener]) -> tuple[str, ...]:
    """Multiaddrs with the real ports; a wildcard becomes the addresses of this machine's interfaces."""
    found: list[str] = []
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        kind = "ip6" if ":" in host else "ip4"
        for address in get_thin_waist_addresses(Multiaddr(f"/{kind}/{host}/tcp/{port}")):
            if str(address) not in found:
                found.append(str(address))
    return tuple(found)


def _why_not(address: str, error: OSError) -> str:
    codes = {error.errno} | {getattr(cause, "errno", None) for cause in getattr(error.__cause__, "exceptions", ())}
    if errno.EADDRINUSE in codes:
        return (
            f"cannot listen on {address}: another process uses this port; stop it or choose another port (0 = any free)"
        )
    if errno.EACCES in codes:
        return f"cannot listen on {address}: not allowed for this user; choose a port above 1023"
    if errno.EADDRNOTAVAIL in codes:
        return f"cannot listen on {address}: no interface of this machine has this address; try 0.0.0.0"
    return f"cannot listen on {address}: {error}"


class BufferedTcp(ReadWriteCloser):
    """A TCP connection as libp2p wants it, reading ahead. Errors are libp2p's ConnectionClosedError."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        """Exactly n bytes (None: whatever comes first). Raises ConnectionClosedError when they cannot come."""
        wanted = 1 if n is None else n
        while len(self._buffer) < wanted:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"connection broken: {error}", transport="tcp") from error
            if not data:
                raise ConnectionClosedError("connection closed by the peer", transport="tcp")
            self._buffer += data
        count = len(self._buffer) if n is None else n
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def write(self, data: bytes) -> None:
        """Hand everything to the kernel. Raises ConnectionClosedError."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"connection broken: {error}", transport="tcp") from error

    async def send_eof(self) -> None:
        """Tell the peer nothing more comes, without cutting what is on its way. Never raises."""
        try:
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return

    async def close(self) -> None:
        """Release the socket."""
        await self._stream.aclose()

    async def abort(self) -> None:
        """Release the socket without waiting; also when cancelled, also twice."""
        await trio.aclose_forcefully(self._stream)

    def get_remote_address(self) -> tuple[str, int] | None:
        """(host, port) of the other end, None once the connection is gone."""
        try:
            host, port = self._stream.socket.getpeername()[:2]
        except OSError:
            return None
        return str(host), int(port)
