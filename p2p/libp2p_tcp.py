"""TCP under libp2p's Noise: listening sockets, dialling, and a buffered byte stream.

py-libp2p 0.8.1's own TCP transport is not used, for these faults of its:
- It listens with SO_REUSEPORT and swallows the error, so a busy port gives no error and two processes can share one.
  Here a busy port is a ConfigurationError (`listen`).
- Its swarm keeps a limiter token and a task for every connection until shutdown, so after 250 inbound connections a
  host is deaf. Here whoever accepts a connection owns it and ends with it (`libp2p_transport`).
- Its `read_exactly` gives up after 100 short reads, which small TCP segments reach. Here a read waits for all it asked.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from multiaddr.exceptions import ProtocolLookupError
from multiaddr.utils import get_thin_waist_addresses

from .errors import ConfigurationError, Unreachable
from .line import Pacer, read_line, set_pace
from .rates import CONTROL_WEIGHT, Limiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from .transport import Stream

T = TypeVar("T")

READ_BYTES = 256 * 1024
"""Read from the socket at once: 4 Noise messages. Unbuffered 64 KiB reads cost a third of the throughput."""

BACKLOG = 128
"""Connections the kernel may hold for us; more dial again."""

READ_EXACT_BYTES_MAX = 65_537
"""The longest message of Noise, its length included. multistream-select may announce any length: not beyond this."""

HANDSHAKE_BYTES_MAX = 8 * 1024
"""All of an honest peer's handshakes take 2 KB; one that tries its protocols one by one a little more."""

HANDSHAKE_WRITES_MAX = 32
"""What we say in them: five times to a peer of ours, and once more for each line that names what we do not speak."""

UNSENT_BYTES_MAX = 256 * 1024
"""Waiting in the kernel, not yet on the line: what a control frame of the same connection has to wait behind."""

RECEIVE_SECONDS = 0.2
"""Under a download cap, what the kernel may take in ahead of us: it would come at the line's rate, not at the cap's."""

RECEIVE_BYTES_MIN = 32 * 1024

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


def _tune(stream: trio.SocketStream, download: Limiter) -> None:
    """Keep the kernel's queues short. What a system does not know is left out: it costs latency, no more."""
    with contextlib.suppress(OSError, AttributeError):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
    if download.bits_per_second is not None:
        ahead = max(RECEIVE_BYTES_MIN, int(download.bits_per_second / 8 * RECEIVE_SECONDS))
        with contextlib.suppress(OSError):
            if ahead < stream.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ahead)


class BufferedTcp(ReadWriteCloser):
    """A TCP connection (or an `OverStream`) as libp2p wants it, reading ahead. Errors are its ConnectionClosedError.

    `inside` says that it is itself carried by one of our connections. `allowance` is what may still be read before the
    handshakes are done, None afterwards: strangers can make libp2p read without end. `weight` is this connection's
    share of a capped download.
    """

    def __init__(self, stream: trio.abc.HalfCloseableStream, download: Limiter | None = None) -> None:
        self.allowance: int | None = HANDSHAKE_BYTES_MAX
        self._handshake_writes = 0
        self.weight: Callable[[], float] = lambda: CONTROL_WEIGHT
        self.inside = isinstance(stream, OverStream)
        self._stream = stream
        self._buffer = bytearray()
        self._pacer = Pacer()
        self._download = download or Limiter(None)
        self._read_bytes = self._download.grant_bytes if self._download.capped else READ_BYTES
        if isinstance(stream, trio.SocketStream):
            _tune(stream, self._download)

    async def read(self, n: int | None = None) -> bytes:
        """Exactly n bytes (None: whatever comes first). Raises ConnectionClosedError when they cannot come."""
        wanted = 1 if n is None else n
        if wanted > READ_EXACT_BYTES_MAX:
            raise ConnectionClosedError(f"the peer announced a message of {n} bytes", transport="tcp")
        while len(self._buffer) < wanted:
            try:
                data = await self._stream.receive_some(self._read_bytes)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"connection broken: {error}", transport="tcp") from error
            if not data:
                raise ConnectionClosedError("connection closed by the peer", transport="tcp")
            if self._download.capped:
                await self._download.pay(self, len(data), self.weight())
            else:
                self._download.count(len(data))
            self._buffer += data
        count = len(self._buffer) if n is None else n
        if self.allowance is not None:
            self.allowance -= count
            if self.allowance < 0:
                raise ConnectionClosedError(f"more than {HANDSHAKE_BYTES_MAX} bytes of handshake", transport="tcp")
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def write(self, data: bytes) -> None:
        """Hand everything to the kernel. Raises ConnectionClosedError."""
        if self.allowance is not None:
            self._handshake_writes += 1
            if self._handshake_writes > HANDSHAKE_WRITES_MAX:
                raise ConnectionClosedError("too many lines in its handshakes", transport="tcp")
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

    def mind_the_queue(self) -> None:
        """Bulk is being sent: keep it from filling the line's queue."""
        if not isinstance(self._stream, trio.SocketStream):
            return
        line = read_line(self._stream.socket)
        before = self._pacer.pace
        if line is not None and self._pacer.step(line) != before:
            set_pace(self._stream.socket, self._pacer.pace)

    async def close(self) -> None:
        """Release the socket."""
        self._download.forget(self)
        await self._stream.aclose()

    async def abort(self) -> None:
        """Release the socket without waiting; also when cancelled, also twice."""
        self._download.forget(self)
        await trio.aclose_forcefully(self._stream)

    def get_remote_address(self) -> tuple[str, int] | None:
        """(host, port) of the other end, None once the connection is gone."""
        if not isinstance(self._stream, trio.SocketStream):
            return None
        try:
            host, port = self._stream.socket.getpeername()[:2]
        except OSError:
            return None
        return str(host), int(port)


class OverStream(trio.abc.HalfCloseableStream):
    """A stream of ours as trio wants one: what a relay carries between two peers is secured and muxed once more."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `trio.abc.SendStream`."""
        await self._call(self._stream.send_all(bytes(data)))

    async def wait_send_all_might_not_block(self) -> None:
        """Nothing is known of it beforehand."""
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        """See `trio.abc.HalfCloseableStream`."""
        await self._call(self._stream.close_write())

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """See `trio.abc.ReceiveStream`."""
        return await self._call(self._stream.receive_some(max_bytes or READ_BYTES))

    async def aclose(self) -> None:
        """Reset: whoever closes has sent what it wanted and waited for it."""
        self._closed = True
        await self._stream.reset()

    async def _call(self, operation: Awaitable[T]) -> T:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        try:
            return await operation
        except Unreachable as error:
            raise trio.BrokenResourceError(str(error)) from error
