"""The transport on real sockets: libp2p's wire (TCP, multistream-select, Noise, yamux) between our processes.

Of py-libp2p 0.8.1 it uses Noise, multistream-select, peer ids and multiaddrs, not the host and swarm: much of what was
found wrong in them has no hook to mend it by. Avoided here, beside what `libp2p_tcp` and `libp2p_yamux` name:
- An exception in a stream handler, or a protocol line that is not UTF-8, kills the host (`basic_host.py:1554`,
  `multiselect_communicator.py:58`). Here either costs its stream (`_serve`).
- By default plaintext is negotiated, so peer ids can be forged. Here Noise is the only security there is.
- `connect` takes 250 ms or more, tries one address, then refuses the peer for 60 s. Here all addresses are dialled at
  once (`_dial`), each with its own time-out; backing off is the caller's.
- Known peers are dialled unasked, and connections are trimmed behind one's back. Here nothing is dialled but by `open`.
- Leaving a host does not close its connections. Here leaving the context flushes and closes them all.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import asynccontextmanager
from socket import gaierror
from typing import TYPE_CHECKING

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.generic_selector import GenericMultistreamSelector
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID, Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import encode_delim

from .errors import ConfigurationError, Unreachable
from .identity import public_key_of
from .libp2p_tcp import BufferedTcp, listen, listening_addresses, parse_address
from .libp2p_yamux import Yamux

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .identity import Identity
    from .libp2p_stream import YamuxStream
    from .messages import PeerAddress
    from .transport import ProtocolName, Stream, StreamHandler, Transport

log = logging.getLogger(__name__)

DIAL_SECONDS = 10.0
"""Bound on reaching one address, handshakes included. All addresses of a peer are tried at the same time."""

HANDSHAKE_SECONDS = 10.0
"""Bound on an inbound connection's handshakes: a stranger who stays silent is not waited for."""

OPEN_SECONDS = 10.0
"""Bound on a peer's answer to a new stream. On a connection silent for as long, the connection is taken for dead."""

INBOUND_MAX = 1024
"""Inbound connections at a time, handshaking ones included: keeps us below common limits on open files."""

CONNECTIONS_PER_PEER_MAX = 4
"""One is needed, two arise when both sides dial at once, a restart may leave a dead one. Beyond: the oldest goes."""

SERVING_PER_PEER_MAX = 256
"""Streams of one peer being handled, over all its connections, dead ones included; beyond, a new one is reset."""

IDLE_SECONDS = 600.0
"""A connection without a stream for this long is closed: peers that no longer need each other free their sockets."""


def protocol_id(protocol: ProtocolName) -> TProtocol:
    """`hello` -> `/echo2/hello/1`."""
    return TProtocol(f"/echo2/{protocol}/1")


@asynccontextmanager
async def open_libp2p_transport(
    identity: Identity, listen_on: Sequence[str], *, announce: Sequence[str] = ()
) -> AsyncIterator[Transport]:
    """A transport listening on multiaddrs such as `/ip4/0.0.0.0/tcp/4001` (port 0: any free one; none: dial only).

    `announce` replaces the addresses told to others, for a machine behind a forwarded port. Leaving the context stops
    handlers, lets what was sent leave, and closes every connection. Raises ConfigurationError when an address is unfit.
    """
    # libp2p logs each stranger's failed handshake as an error of ours; what matters of it we say ourselves.
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    for address in announce:
        try:
            parse_address(address)
        except ValueError as error:
            raise ConfigurationError(f"cannot announce: {error}") from error
    listeners = await listen(listen_on)
    body_error: Exception | None = None
    async with trio.open_nursery() as connections:
        transport = Libp2pTransport(identity, tuple(announce) or listening_addresses(listeners), connections)
        try:
            async with trio.open_nursery() as handlers:
                transport.start(listeners, handlers)
                try:
                    yield transport
                except Exception as error:  # noqa: BLE001 - raised again outside, lest the nurseries wrap it in a group
                    body_error = error
                finally:
                    transport.stop_serving()
                handlers.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await transport.close()
            connections.cancel_scope.cancel()
    if body_error is not None:
        raise body_error


class Libp2pTransport:
    """See `transport.Transport`; made by `open_libp2p_transport`."""

    def __init__(self, identity: Identity, addresses: tuple[str, ...], connections: trio.Nursery) -> None:
        key_pair = create_new_key_pair(identity.seed)
        noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
        self._peer_id = identity.peer_id
        self._addresses = addresses
        self._upgrader = TransportUpgrader({NOISE_ID: noise}, {}, negotiate_timeout=int(HANDSHAKE_SECONDS))
        self._muxers: GenericMultistreamSelector[None] = GenericMultistreamSelector()
        self._muxers.add_handler(TProtocol(YAMUX_ID), None)
        self._protocols = Multiselect()
        self._handlers: dict[str, StreamHandler] = {}
        self._connections: dict[str, list[Yamux]] = {}
        self._dialling: dict[str, trio.Lock] = {}
        self._serving: Counter[str] = Counter()
        self._inbound = 0
        self._leaving = False
        self._nursery = connections
        self._handler_nursery = connections
        self._accepting = trio.CancelScope()

    @property
    def peer_id(self) -> str:
        """Our own peer id."""
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses we listen on, as others may dial them."""
        return self._addresses

    def set_handler(self, protocol: ProtocolName, handler: StreamHandler) -> None:
        """Serve inbound streams of `protocol`."""
        self._handlers[protocol_id(protocol)] = handler
        self._protocols.add_handler(protocol_id(protocol), None)

    async def open(self, peer: PeerAddress, protocol: ProtocolName) -> Stream:
        """A new stream, on a connection that lives or on a new one. Raises Unreachable."""
        for _ in range(CONNECTIONS_PER_PEER_MAX + 1):
            connection = self._usable(peer.peer)
            fresh = connection is None
            if connection is None:
                connection = await self._connect(peer)
            try:
                return await self._open_on(connection, protocol)
            except Unreachable:
                # A connection from before the peer's crash looks alive until it is used: then dial anew, once.
                if fresh or connection.usable:
                    raise
        raise Unreachable(f"{peer.peer}: every connection to it died while a stream was being opened")

    async def disconnect(self, peer: str) -> None:
        """Close every connection to `peer`."""
        async with trio.open_nursery() as nursery:
            for connection in self._connections.get(peer, ()):
                nursery.start_soon(connection.close)

    def start(self, listeners: Sequence[trio.SocketListener], handlers: trio.Nursery) -> None:
        """Begin to accept; stream handlers run in `handlers`."""
        self._handler_nursery = handlers
        if listeners:
            self._nursery.start_soon(self._accept, listeners)
        self._nursery.start_soon(self._close_idle)

    def stop_serving(self) -> None:
        """Refuse new streams; the handlers are about to be cancelled."""
        self._leaving = True

    async def close(self) -> None:
        """Accept nothing more and close every connection, letting what was sent leave first."""
        self._accepting.cancel()
        async with trio.open_nursery() as nursery:
            for peer in list(self._connections):
                nursery.start_soon(self.disconnect, peer)

    # Connections.

    def _usable(self, peer: str) -> Yamux | None:
        return next((known for known in reversed(self._connections.get(peer, [])) if known.usable), None)

    async def _connect(self, peer: PeerAddress) -> Yamux:
        """Dial, unless another task is at it: then take its connection."""
        lock = self._dialling.setdefault(peer.peer, trio.Lock())
        try:
            async with lock:
                return self._usable(peer.peer) or await self._dial(peer)
        finally:
            if not lock.locked():
                self._dialling.pop(peer.peer, None)

    async def _dial(self, peer: PeerAddress) -> Yamux:
        if peer.peer == self._peer_id:
            raise Unreachable(f"{peer.peer} is this process itself")
        if not peer.addresses:
            raise Unreachable(f"{peer.peer} is not connected and has no address to dial")
        won: list[Yamux] = []
        failures: list[str] = []

        async def attempt(address: str, nursery: trio.Nursery) -> None:
            try:
                with trio.fail_after(DIAL_SECONDS):
                    connection = await self._dial_address(peer.peer, address)
            except trio.TooSlowError:
                failures.append(f"{address}: no answer within {DIAL_SECONDS:.0f} s")
            except Exception as error:  # noqa: BLE001 - whatever the other end made libp2p raise, this address failed
                failures.append(f"{address}: {_reason(error)}")
            else:
                won.append(connection)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for address in peer.addresses:
                nursery.start_soon(attempt, address, nursery)
        if not won:
            raise Unreachable(f"cannot reach {peer.peer}: {'; '.join(failures)}")
        return won[0]  # a second winner of the same instant is a connection like any other

    async def _dial_address(self, peer: str, address: str) -> Yamux:
        host, port = parse_address(address)
        socket = BufferedTcp(await trio.open_tcp_stream(host, port))
        try:
            secured = await self._upgrader.upgrade_security(RawConnection(socket, True), True, ID.from_base58(peer))
            await self._muxers.select(secured, True, int(HANDSHAKE_SECONDS))
        except BaseException:
            await socket.abort()
            raise
        connection = Yamux(secured, socket, peer, initiator=True, accept=self._accept_stream)
        self._add(connection)
        self._nursery.start_soon(self._run, connection)
        return connection

    async def _accept(self, listeners: Sequence[trio.SocketListener]) -> None:
        with self._accepting:
            await trio.serve_listeners(self._accepted, list(listeners), handler_nursery=self._nursery)

    async def _accepted(self, stream: trio.SocketStream) -> None:
        socket = BufferedTcp(stream)
        if self._inbound >= INBOUND_MAX:
            log.warning("%d inbound connections: refused one more", self._inbound)
            await socket.abort()
            return
        self._inbound += 1
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                secured = await self._upgrader.upgrade_security(RawConnection(socket, False), False)
                await self._muxers.select(secured, False, int(HANDSHAKE_SECONDS))
                peer = str(secured.get_remote_peer())
                public_key_of(peer)  # a peer that is not an Ed25519 key could not sign anything we ask of it
            connection = Yamux(secured, socket, peer, initiator=False, accept=self._accept_stream)
            self._add(connection)
            await self._run(connection)
        except Exception as error:  # noqa: BLE001 - a stranger's handshake may raise anything; it is only its connection
            log.debug("inbound connection from %s failed: %s", socket.get_remote_address(), _reason(error))
        finally:
            self._inbound -= 1
            await socket.abort()

    def _add(self, connection: Yamux) -> None:
        known = self._connections.setdefault(connection.peer, [])
        known.append(connection)
        if len(known) > CONNECTIONS_PER_PEER_MAX:
            self._nursery.start_soon(known[0].close)

    async def _run(self, connection: Yamux) -> None:
        try:
            await connection.run()
        finally:
            log.debug("connection with %s ended: %s", connection.peer, connection.closed)
            known = self._connections[connection.peer]
            known.remove(connection)
            if not known:
                del self._connections[connection.peer]

    async def _close_idle(self) -> None:
        while True:
            await trio.sleep(IDLE_SECONDS / 10)
            for connection in [one for known in self._connections.values() for one in known]:
                if not connection.stream_count and trio.current_time() - connection.used_at > IDLE_SECONDS:
                    await connection.close()

    # Streams.

    async def _open_on(self, connection: Yamux, protocol: ProtocolName) -> YamuxStream:
        """One round trip: both lines of multistream-select are sent at once, then the answers are awaited."""
        wanted = protocol_id(protocol)
        heard = connection.heard_bytes
        stream = connection.open_stream()
        agreed = False
        try:
            with trio.move_on_after(OPEN_SECONDS):
                await stream.send_all(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(wanted.encode()))
                lines = MultiselectCommunicator(_Lines(stream))
                if await lines.read() != MULTISELECT_PROTOCOL_ID:
                    raise Unreachable(f"{connection.peer} does not speak multistream-select")
                if await lines.read() != wanted:
                    raise Unreachable(f"{connection.peer} does not serve {wanted}")
                agreed = True
                return stream
            if connection.heard_bytes == heard:
                connection.kill(f"nothing heard for {OPEN_SECONDS:.0f} s while a stream was being opened")
            raise Unreachable(f"{connection.peer} did not answer a new {wanted} within {OPEN_SECONDS:.0f} s")
        except Unreachable:
            raise
        except Exception as error:
            raise Unreachable(f"{connection.peer} did not accept a {wanted}: {_reason(error)}") from error
        finally:
            if not agreed:
                await stream.reset()

    def _accept_stream(self, stream: YamuxStream) -> bool:
        if self._leaving:
            return False
        if self._serving[stream.peer] >= SERVING_PER_PEER_MAX:
            log.warning("%s has %d streams being served: refused one more", stream.peer, SERVING_PER_PEER_MAX)
            return False
        self._serving[stream.peer] += 1
        self._handler_nursery.start_soon(self._serve, stream)
        return True

    async def _serve(self, stream: YamuxStream) -> None:
        # Upstream fault: an exception here, libp2p's own for a malformed line included, would end the whole host.
        try:
            protocol = await self._negotiated(stream)
            await self._handlers[protocol](stream)
        except Unreachable as error:
            log.debug("stream from %s: %s", stream.peer, error)
        except Exception:
            log.exception("serving a stream of %s failed; only that stream is lost", stream.peer)
            await stream.reset()
        finally:
            stream.abandon()
            self._serving[stream.peer] -= 1
            if not self._serving[stream.peer]:
                del self._serving[stream.peer]

    async def _negotiated(self, stream: YamuxStream) -> str:
        communicator = MultiselectCommunicator(_Lines(stream))
        try:
            protocol, _ = await self._protocols.negotiate(communicator, int(HANDSHAKE_SECONDS))
        except Exception as error:  # libp2p lets UnicodeDecodeError and others through
            raise Unreachable(f"no protocol agreed with {stream.peer}: {_reason(error)}") from error
        return str(protocol)


class _Lines(ReadWriteCloser):
    """A stream as multistream-select's reader wants it. What the peer sends is foreign: see `_open_on` and `_serve`."""

    def __init__(self, stream: YamuxStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        """1 to n bytes. Raises ConnectionClosedError at the end of the stream."""
        data = await self._stream.receive_some(n or 1)
        if not data:
            raise ConnectionClosedError("the stream ended during negotiation", transport="yamux")
        return data

    async def write(self, data: bytes) -> None:
        """Send everything."""
        await self._stream.send_all(data)

    async def close(self) -> None:
        """Reset."""
        await self._stream.reset()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Not known here."""
        return None


def _reason(error: BaseException) -> str:
    """The innermost cause in words: libp2p wraps the one that says something in several that do not."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):  # an attempt for each of a name's addresses
        return "; ".join(dict.fromkeys(map(_reason, error.exceptions)))
    if isinstance(error, OSError) and not isinstance(error, gaierror) and error.errno:
        return os.strerror(error.errno).lower()
    return f"{error}" or type(error).__name__
