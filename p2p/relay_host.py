"""What relaying and hole punching need of a host beyond `transport.Transport`: foreign protocols, single connections.

`Host` is the interface; `Libp2pHost` is it over `libp2p_transport`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import trio

from .errors import Unreachable
from .libp2p_tcp import HostPort
from .libp2p_transport import DialStrategy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .libp2p_stream import YamuxStream
    from .libp2p_transport import Libp2pTransport
    from .libp2p_yamux import Traffic, Via, Yamux
    from .messages import PeerAddress
    from .transport import ProtocolName, Stream, StreamHandler


class Link(Protocol):
    """One connection."""

    keep: bool
    """Not to be closed for being idle."""

    @property
    def peer(self) -> str:
        """Authenticated peer id of the other end."""

    @property
    def via(self) -> str:
        """`direct`, `punched` or `relay`."""

    @property
    def closed(self) -> str | None:
        """Why it ended, once it has."""

    @property
    def stream_count(self) -> int:
        """Streams open now, either way."""

    async def close(self) -> None:
        """End it politely."""


class Host(Protocol):
    """A process's connections, as far as relaying is concerned."""

    @property
    def peer_id(self) -> str:
        """Our own peer id."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses we listen on, as others may dial them."""

    @property
    def listening(self) -> tuple[trio.socket.SocketType, ...]:
        """The sockets we listen on."""

    def set_raw_handler(self, protocol: str, handler: StreamHandler) -> None:
        """Serve inbound streams of a protocol by its full id."""

    async def open_raw(self, peer: PeerAddress, protocol: str, *, relayed: bool) -> Stream:
        """A new stream on a connection of the wanted kind; a direct one is dialled if needed. Raises Unreachable."""

    async def connect(self, peer: PeerAddress) -> Link:
        """A direct connection, dialled if there is none. Raises Unreachable."""

    def link_of(self, stream: Stream) -> Link:
        """The connection a stream belongs to."""

    def offence(self, peer: str, reason: str) -> None:
        """Count against `peer` that it broke a protocol."""

    async def wait_closed(self, link: Link) -> None:
        """Return when the connection has ended."""

    def direct_link(self, peer: str) -> Link | None:
        """A live connection to `peer` that does not run through a relay."""

    async def open_on(self, link: Link, protocol: str) -> Stream:
        """A new stream on this very connection. Raises Unreachable."""

    def remote_of(self, link: Link) -> HostPort | None:
        """Where the other end of a direct connection is seen from here."""

    async def proves(self, peer: str, remote: HostPort) -> None:
        """Dial `remote` anew and see that `peer` is there; then let go. Raises Unreachable or OSError."""

    async def upgrade_outbound(
        self, stream: trio.abc.HalfCloseableStream | Stream, peer: str, *, via: Via = "direct"
    ) -> Link:
        """Secure a byte stream as the side that speaks first. Raises Unreachable unless `peer` is at its end."""

    async def upgrade_inbound(self, stream: trio.abc.HalfCloseableStream | Stream, *, via: Via = "direct") -> Link:
        """Secure a byte stream as the side that is spoken to. Raises Unreachable."""


class Libp2pHost:
    """`Host` over the transport on real sockets."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self._transport = transport

    @property
    def peer_id(self) -> str:
        """Our own peer id."""
        return self._transport.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses we listen on, as others may dial them."""
        return self._transport.addresses

    @property
    def listening(self) -> tuple[trio.socket.SocketType, ...]:
        """The sockets we listen on."""
        return tuple(listener.socket for listener in self._transport.listeners)

    def set_raw_handler(self, protocol: str, handler: StreamHandler) -> None:
        """See `Host`."""
        self._transport.set_handler(cast("ProtocolName", protocol), handler)

    async def open_raw(self, peer: PeerAddress, protocol: str, *, relayed: bool) -> Stream:
        """See `Host`."""
        link = self._link(peer.peer, relayed=relayed)
        if link is None and relayed:
            raise Unreachable(f"{peer.peer} is not connected through a relay")
        return await self.open_on(link or await self.connect(peer), protocol)

    async def connect(self, peer: PeerAddress) -> Link:
        """See `Host`."""
        link = self._link(peer.peer, relayed=False) or await self._transport.connect(peer)
        if link.via == "relay":
            raise Unreachable(f"{peer.peer} can only be reached through a relay")
        return link

    def add_way(self, name: str, dial: Callable[[PeerAddress, Traffic], Awaitable[Link]]) -> None:
        """One more way to peers that cannot be dialled; `dial` returns a connection that it has had upgraded here."""
        way = cast("Callable[[PeerAddress, Traffic], Awaitable[Yamux]]", dial)
        self._transport.dial_strategies.append(DialStrategy(name, way))

    def link_of(self, stream: Stream) -> Link:
        """See `Host`."""
        return cast("YamuxStream", stream).connection

    def offence(self, peer: str, reason: str) -> None:
        """See `Host`."""
        self._transport.offence(peer, reason)

    async def wait_closed(self, link: Link) -> None:
        """See `Host`."""
        await cast("Yamux", link).wait_closed()

    def direct_link(self, peer: str) -> Link | None:
        """See `Host`."""
        return self._link(peer, relayed=False)

    def _link(self, peer: str, *, relayed: bool) -> Yamux | None:
        known = self._transport.connections(peer)
        return next((one for one in reversed(known) if one.usable and (one.via == "relay") == relayed), None)

    async def open_on(self, link: Link, protocol: str) -> Stream:
        """See `Host`."""
        return await self._transport.open_on(cast("Yamux", link), cast("ProtocolName", protocol))

    def remote_of(self, link: Link) -> HostPort | None:
        """See `Host`."""
        remote = None if link.via == "relay" else cast("Yamux", link).remote
        return HostPort(*remote) if remote else None

    async def proves(self, peer: str, remote: HostPort) -> None:
        """See `Host`."""
        await self._transport.prove(peer, remote)

    async def upgrade_outbound(
        self, stream: trio.abc.HalfCloseableStream | Stream, peer: str, *, via: Via = "direct"
    ) -> Link:
        """See `Host`."""
        return await self._transport.upgrade_outbound(stream, peer, via=via)

    async def upgrade_inbound(self, stream: trio.abc.HalfCloseableStream | Stream, *, via: Via = "direct") -> Link:
        """See `Host`."""
        return await self._transport.upgrade_inbound(stream, via=via)
