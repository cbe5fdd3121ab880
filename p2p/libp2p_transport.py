"""The transport on real sockets: libp2p's wire (TCP, multistream-select, Noise, yamux) between our processes.

Of py-libp2p 0.8.1 it uses Noise, multistream-select, peer ids and multiaddrs, not the host and swarm: much of what was
found wrong in them has no hook to mend it by. Avoided here, beside what the `libp2p_*` modules name:
- An exception in a stream handler kills the host (`basic_host.py:1554`). Here it costs its stream (`_serve`).
- `connect` takes 250 ms or more, tries one address, then refuses the peer for 60 s. Here see `dialer` and `guards`.
- Known peers are dialled unasked, and connections are trimmed behind one's back. Here nothing is dialled but by `open`.
- Leaving a host does not close its connections. Here leaving the context flushes and closes them all.

Who comes in: a stranger's address under its caps (`guards.Admission`), its handshakes in time and in bytes, then its
peer id (`allow`, `guards.Bans`), and from then on what it does is counted: a protocol error is an offence, several are
a ban. Megabytes (`BULK`) and everything else have each their own connection (`libp2p_pool`).
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import trio
from libp2p.protocol_muxer.multiselect import Multiselect

from .errors import ConfigurationError, Unreachable
from .guards import Admission, Buffers, TransportLimits
from .libp2p_dialling import Dialling, DialStrategy
from .libp2p_negotiate import BadLine, Negotiations, ask_for, protocol_id, reason_of
from .libp2p_pool import Pool
from .libp2p_tcp import BufferedTcp, HostPort, OverStream, listen, listening_addresses, parse_address
from .libp2p_upgrade import HANDSHAKE_SECONDS, Upgrader
from .libp2p_yamux import Yamux
from .line import LOOK_SECONDS
from .open_files import connections_max
from .peer_memory import PeerMemory
from .places import Places
from .rates import Limiter, Throughput
from .transport_view import TransportView, ban_views, connection_views, unreachable_views

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from libp2p.abc import ISecureConn

    from .dialer import DialReport, Endpoint
    from .guards import Ban
    from .identity import Identity
    from .libp2p_stream import YamuxStream
    from .libp2p_yamux import Traffic, Via
    from .messages import PeerAddress
    from .places import Place
    from .transport import ProtocolName, Stream, StreamHandler

log = logging.getLogger(__name__)

__all__ = ["DialStrategy", "Libp2pTransport", "open_libp2p_transport"]

BULK = frozenset({"chunks"})
"""Protocols that carry megabytes."""

DIAL_SECONDS = 10.0
"""Bound on reaching one address, handshakes included."""

OPEN_SECONDS = 10.0
"""Bound on a peer's answer to a new stream. On a connection silent for as long, the connection is taken for dead."""

IDLE_SECONDS = 600.0
"""A connection without a stream for this long is closed: peers that no longer need each other free their sockets."""

PLACES_SECONDS = 2.0
"""Between two looks at who is still a stranger."""

REFUSALS_SECONDS = 10.0
"""Between two log lines about refused strangers; those in between are counted."""


@asynccontextmanager
async def open_libp2p_transport(
    identity: Identity,
    listen_on: Sequence[str],
    *,
    announce: Sequence[str] = (),
    limits: TransportLimits | None = None,
    state_dir: Path | None = None,
    allow: Callable[[str], bool] | None = None,
    wall: Callable[[], float] = time.time,
) -> AsyncIterator[Libp2pTransport]:
    """A transport listening on multiaddrs such as `/ip4/0.0.0.0/tcp/4001` (port 0: any free one; none: dial only).

    `announce` replaces the addresses told to others, for a machine behind a forwarded port. Bans and back-off are kept
    in `state_dir`; without one they end with the process. `allow` is asked about each peer id that has proved itself.
    Leaving the context stops handlers, lets what was sent leave, and closes every connection. Raises ConfigurationError
    when an address is unfit.
    """
    # libp2p logs each stranger's failed handshake as an error of ours; what matters of it we say ourselves.
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    for address in announce:
        try:
            parse_address(address)
        except ValueError as error:
            raise ConfigurationError(f"cannot announce: {error}") from error
    limits = limits or TransportLimits()
    if listen_on:
        most = connections_max(limits.inbound_max)
        # Silent strangers may hold half of the places at most: the other half is for those who proved a key.
        limits = replace(limits, inbound_max=most, handshakes_max=max(1, min(limits.handshakes_max, most // 2)))
    listeners = await listen(listen_on)
    addresses = tuple(announce) or listening_addresses(listeners)
    body_error: Exception | None = None
    async with trio.open_nursery() as connections:
        transport = Libp2pTransport(
            identity, addresses, connections, limits, state_dir=state_dir, allow=allow, wall=wall
        )
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

    def __init__(
        self,
        identity: Identity,
        addresses: tuple[str, ...],
        connections: trio.Nursery,
        limits: TransportLimits,
        *,
        state_dir: Path | None,
        allow: Callable[[str], bool] | None,
        wall: Callable[[], float],
    ) -> None:
        self.listeners: tuple[trio.SocketListener, ...] = ()
        self._peer_id = identity.peer_id
        self._addresses = addresses
        self._limits = limits
        self._allow = allow or (lambda _peer: True)
        self._upgrader = Upgrader(identity)
        self._protocols = Multiselect()
        self._negotiations = Negotiations(self._protocols)
        self._handlers: dict[str, StreamHandler] = {}
        self._nursery = connections
        self._handler_nursery = connections
        self._pool = Pool(limits.per_peer_connections_max, lambda one: connections.start_soon(one.close))
        self._connections = self._pool.by_peer
        self._serving: Counter[str] = Counter()
        self._admission = Admission(limits)
        self._places = Places(limits)
        self._buffers = Buffers(each_max=limits.connection_buffer_bytes_max, total_max=limits.buffer_bytes_max)
        self._unsent = Buffers(
            each_max=limits.connection_unsent_bytes_max,
            total_max=limits.unsent_bytes_max,
            first=lambda connection: connection.takes_nothing,
        )
        self._upload = Limiter(limits.upload_bits_per_second)
        self._download = Limiter(limits.download_bits_per_second)
        self._sent, self._received = Throughput(), Throughput()
        self._memory = PeerMemory(state_dir, limits.offences_max, random.SystemRandom().random, wall)
        self._dialling = Dialling(self._pool, self._memory, self._dial_endpoint, self._raise_if_refused)
        self.dial_strategies = self._dialling.strategies
        self._refusals = 0
        self._refusals_said_at = -REFUSALS_SECONDS
        self._leaving = False
        self._accepting = trio.CancelScope()

    @property
    def peer_id(self) -> str:
        """Our own peer id."""
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses we listen on, as others may dial them."""
        return self._addresses

    @property
    def _inbound(self) -> int:
        return self._admission.total

    @property
    def _handshaking(self) -> list[Place]:
        return self._places.handshakes

    def tell_apart(self, known: Callable[[str], bool]) -> None:
        """From now on those for whom `known` (peer id -> admitted here) says no are strangers: see `places`."""
        self._places.known = lambda peer: known(peer) or any(one.initiator for one in self._connections.get(peer, ()))

    def set_handler(self, protocol: ProtocolName, handler: StreamHandler) -> None:
        """Serve inbound streams of `protocol`."""
        self._handlers[protocol_id(protocol)] = handler
        self._protocols.add_handler(protocol_id(protocol), None)

    async def open(self, peer: PeerAddress, protocol: ProtocolName) -> Stream:
        """A new stream, on a connection that lives or on a new one. Raises Unreachable."""
        traffic: Traffic = "bulk" if protocol in BULK else "control"
        for _ in range(self._limits.per_peer_connections_max + 1):
            connection = self._pool.best(peer.peer, traffic)
            fresh = connection is None
            if connection is None:
                connection = await self.connect(peer, traffic)
            try:
                stream = await self.open_on(connection, protocol)
                connection.carries_bulk |= traffic == "bulk"
                return stream
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
        self.listeners = tuple(listeners)
        self._memory.recall()
        self._nursery.start_soon(self._memory.run)
        if listeners:
            self._nursery.start_soon(self._accept, listeners)
        for service in (self._upload.run, self._download.run, self._close_idle, self._mind_lines, self._mind_strangers):
            self._nursery.start_soon(service)

    def stop_serving(self) -> None:
        """Refuse new streams; the handlers are about to be cancelled."""
        self._leaving = True

    async def close(self) -> None:
        """Accept nothing more and close every connection, letting what was sent leave first."""
        self._accepting.cancel()
        async with trio.open_nursery() as nursery:
            for peer in list(self._connections):
                nursery.start_soon(self.disconnect, peer)
        await self._memory.flush()

    # What a person, and the services above, may ask and say.

    def dial_report(self, peer: str) -> DialReport | None:
        """What the last dial of `peer` tried, and what came of it; of one dialled lately."""
        return self._dialling.reports.get(peer)

    def remote(self, peer: str) -> str | None:
        """See `Transport`."""
        connections = reversed(self._connections.get(peer, ()))
        return next((one.remote[0] for one in connections if one.remote is not None and one.via != "relay"), None)

    def ban(self, peer: str, reason: str, seconds: float | None = None) -> None:
        """Refuse `peer` from now on, for `seconds` or longer each time, and end its connections."""
        self._banned(self._memory.ban(peer, reason, seconds))

    def lift_ban(self, peer: str) -> None:
        """Forgive `peer` everything."""
        self._memory.lift(peer)

    def offence(self, peer: str, reason: str) -> None:
        """`peer` broke a protocol. Several times within ten minutes, and it is banned."""
        ban = self._memory.offence(peer, reason)
        if ban is not None:
            self._banned(ban)

    def view(self) -> TransportView:
        """The state now."""
        now = trio.current_time()
        return TransportView(
            upload_bits_per_second_max=self._limits.upload_bits_per_second,
            download_bits_per_second_max=self._limits.download_bits_per_second,
            sent_bytes=self._upload.passed_bytes,
            received_bytes=self._download.passed_bytes,
            sent_bits_per_second=self._sent.bits_per_second(self._upload.passed_bytes, now),
            received_bits_per_second=self._received.bits_per_second(self._download.passed_bytes, now),
            inbound_connections=self._admission.total,
            unread_bytes=self._buffers.total,
            connections=connection_views(self._pool),
            unreachable=unreachable_views(self._memory, self._dialling.reports),
            bans=ban_views(self._memory),
        )

    def _banned(self, ban: Ban) -> None:
        log.warning("%s is refused: %s", ban.peer, ban.reason)
        for connection in list(self._connections.get(ban.peer, ())):
            connection.kill(f"it is banned: {ban.reason}", drop=True)

    # Going out.

    async def connect(self, peer: PeerAddress, traffic: Traffic = "control") -> Yamux:
        """A connection for `traffic`, made anew unless another task has just made one. Raises Unreachable."""
        if peer.peer == self._peer_id:
            raise Unreachable(f"{peer.peer} is this process itself")
        return await self._dialling.connect(peer, traffic, seconds_max=DIAL_SECONDS)

    async def _dial_endpoint(self, endpoint: Endpoint, peer: str, traffic: Traffic) -> Yamux:
        stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
        return await self.upgrade_outbound(stream, peer, traffic=traffic)

    def connections(self, peer: str) -> tuple[Yamux, ...]:
        """Those with `peer`, oldest first."""
        return tuple(self._connections.get(peer, ()))

    async def prove(self, peer: str, remote: HostPort) -> None:
        """Dial `remote` anew and see that `peer` is there; then let go. Raises Unreachable or OSError."""
        socket = self._socket(await trio.open_tcp_stream(*remote))
        try:
            await self._upgrader.prove(socket, peer)
        except Exception as error:
            raise Unreachable(f"{remote.host} port {remote.port} did not prove to be {peer}") from error
        finally:
            with trio.CancelScope(shield=True):
                await socket.abort()

    # Connections over any bytes: for dialling, for relays, for hole punching.

    async def upgrade_outbound(
        self,
        stream: trio.abc.HalfCloseableStream | Stream,
        peer: str,
        *,
        via: Via = "direct",
        traffic: Traffic | None = None,
    ) -> Yamux:
        """A connection in the pool over a way to `peer`, as the dialling side. Raises Unreachable; owns `stream`."""
        socket = self._socket(stream)
        connection = self._established(await self._secure(socket, peer), socket, initiator=True, via=via)
        connection.traffic = traffic
        self._nursery.start_soon(self._run, connection)
        return connection

    async def upgrade_inbound(self, stream: trio.abc.HalfCloseableStream | Stream, *, via: Via = "direct") -> Yamux:
        """The same as the listening side, for whoever proves to be at the other end."""
        socket = self._socket(stream)
        connection = self._established(await self._secure(socket, None), socket, initiator=False, via=via)
        self._nursery.start_soon(self._run, connection)
        return connection

    def _socket(self, stream: trio.abc.HalfCloseableStream | Stream) -> BufferedTcp:
        if isinstance(stream, trio.abc.HalfCloseableStream):
            return BufferedTcp(stream, self._download)
        return BufferedTcp(OverStream(stream))  # under no cap of its own: the stream's bytes are counted already

    async def _secure(self, socket: BufferedTcp, peer: str | None) -> ISecureConn:
        """The handshakes, in time. Raises Unreachable; the socket is then closed."""
        secured: ISecureConn | None = None
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                if peer is None:
                    secured = await self._upgrader.inbound(socket)
                else:
                    secured = await self._upgrader.outbound(socket, peer)
            self._raise_if_refused(str(secured.get_remote_peer()))
            socket.allowance = None
            return secured
        except trio.TooSlowError as error:
            secured = None
            raise Unreachable(f"no handshake within {HANDSHAKE_SECONDS:.0f} s") from error
        except Unreachable:
            secured = None
            raise
        except Exception as error:
            raise Unreachable(f"handshake failed: {reason_of(error)}") from error
        finally:
            if secured is None:
                await socket.abort()

    def _raise_if_refused(self, peer: str) -> None:
        self._memory.raise_if_banned(peer)
        if not self._allow(peer):
            raise Unreachable(f"{peer} is not allowed here")

    def _established(self, secured: ISecureConn, socket: BufferedTcp, *, initiator: bool, via: Via) -> Yamux:
        connection = Yamux(
            secured,
            socket,
            str(secured.get_remote_peer()),
            initiator=initiator,
            accept=self._accept_stream,
            buffers=self._buffers,
            unsent=self._unsent,
            upload=None if socket.inside else self._upload,
        )
        connection.via, connection.remote = via, socket.get_remote_address()
        socket.weight = lambda: connection.receiving_weight
        self._memory.reached(connection.peer)
        self._pool.add(connection)
        return connection

    async def _run(self, connection: Yamux) -> None:
        try:
            await connection.run()
        finally:
            log.debug("connection with %s ended: %s", connection.peer, connection.closed)
            self._pool.remove(connection)
            if connection.fault is not None:
                self.offence(connection.peer, connection.fault)

    # Coming in.

    async def _accept(self, listeners: Sequence[trio.SocketListener]) -> None:
        with self._accepting:
            await trio.serve_listeners(self._accepted, list(listeners), handler_nursery=self._nursery)

    async def _accepted(self, stream: trio.SocketStream) -> None:
        socket = self._socket(stream)
        host = (socket.get_remote_address() or ("", 0))[0]
        refused = self._admission.enter(host, trio.current_time(), self._places.make_room)
        if refused is not None:
            self._refuse(host, refused)
            await socket.abort()
            return
        scope = trio.CancelScope()
        place = self._places.enter(host, trio.current_time(), lambda _reason: scope.cancel())
        try:
            connection = await self._shake_hands(socket, scope, place)
            if connection is not None:
                await self._run(connection)
        finally:
            self._places.leave(place)
            self._admission.leave(host)
            await socket.abort()

    async def _shake_hands(self, socket: BufferedTcp, scope: trio.CancelScope, place: Place) -> Yamux | None:
        try:
            with scope:
                secured = await self._secure(socket, None)
                connection = self._established(secured, socket, initiator=False, via="direct")
                self._places.settle(
                    place, connection.peer, trio.current_time(), connection.kill, lambda: not connection.stream_count
                )
                return connection
        except Unreachable as error:
            log.debug("inbound connection from %s failed: %s", socket.get_remote_address(), error)
        return None

    def _refuse(self, host: str, reason: str) -> None:
        """Say so, but not for each of a flood."""
        self._refusals += 1
        now = trio.current_time()
        if now - self._refusals_said_at >= REFUSALS_SECONDS:
            log.warning("refused %d inbound connections, the last from %s: %s", self._refusals, host, reason)
            self._refusals, self._refusals_said_at = 0, now

    async def _close_idle(self) -> None:
        while True:
            await trio.sleep(IDLE_SECONDS / 10)
            await self._pool.close_idle(IDLE_SECONDS)

    async def _mind_strangers(self) -> None:
        while True:
            await trio.sleep(PLACES_SECONDS)
            self._places.look(trio.current_time())

    async def _mind_lines(self) -> None:
        while True:
            self._sent.note(self._upload.passed_bytes, trio.current_time())
            self._received.note(self._download.passed_bytes, trio.current_time())
            await trio.sleep(LOOK_SECONDS)
            for connection in self._pool:
                connection.mind_the_queue()

    # Streams.

    async def open_on(self, connection: Yamux, protocol: ProtocolName) -> YamuxStream:
        """A new stream on this very connection. Raises Unreachable."""
        wanted = protocol_id(protocol)
        heard = connection.heard_bytes
        stream = connection.open_stream()
        agreed = False
        try:
            with trio.move_on_after(OPEN_SECONDS):
                await ask_for(stream, wanted)
                agreed = True
                return stream
            if connection.heard_bytes == heard:
                connection.kill(f"nothing heard for {OPEN_SECONDS:.0f} s while a stream was being opened")
            raise Unreachable(f"{connection.peer} did not answer a new {wanted} within {OPEN_SECONDS:.0f} s")
        except Unreachable:
            raise
        except Exception as error:
            raise Unreachable(f"{connection.peer} did not accept a {wanted}: {reason_of(error)}") from error
        finally:
            if not agreed:
                await stream.reset()

    def _accept_stream(self, stream: YamuxStream) -> bool:
        if self._leaving:
            return False
        most = self._limits.per_peer_streams_max
        if self._serving[stream.peer] >= most:
            self._refuse(stream.peer, f"{most} streams of it are being served")
            return False
        self._serving[stream.peer] += 1
        self._handler_nursery.start_soon(self._serve, stream)
        return True

    async def _serve(self, stream: YamuxStream) -> None:
        # Upstream fault: an exception here, libp2p's own for a malformed line included, would end the whole host.
        try:
            protocol = await self._negotiations.agree(stream)
            bulk = protocol in _BULK_IDS
            if bulk and stream.connection.via == "relay":
                raise Unreachable("megabytes are not sent through a relay: it pays for what it carries")
            stream.says_what_for("bulk" if bulk else "control")
            stream.connection.carries_bulk |= bulk
            await self._handlers[protocol](stream)
        except Unreachable as error:
            log.debug("stream from %s: %s", stream.peer, error)
        except BadLine as error:
            self.offence(stream.peer, str(error))
            await stream.reset()
        except Exception:
            log.exception("serving a stream of %s failed; only that stream is lost", stream.peer)
            await stream.reset()
        finally:
            stream.abandon()
            self._serving[stream.peer] -= 1
            if not self._serving[stream.peer]:
                del self._serving[stream.peer]


_BULK_IDS = frozenset(f"/echo2/{name}/1" for name in BULK)
