"""The seam between our protocols and the network: byte streams between authenticated peers.

Two implementations under one suite (`tests/contract/test_transport.py`): `libp2p_transport` on real sockets, and
`memory` with seeded delay, loss and rate, which lets the whole system run under a virtual clock. Everything above this
line (frames, requests, broadcast, services) is the same code in both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

from .messages import PeerAddress

ProtocolName = Literal[
    "hello",
    "heartbeat",
    "manifest",
    "chunks",
    "leases",
    "tokenizer",
    "rollouts",
    "receipts",
    "statement",
    "appeal",
    "admitted",
    "report",
    "publish",
]
"""`/echo2/<name>/1` on the wire."""

NOT_SERVED = "it may still be starting, or be of another release"
"""What it means, as a rule, that a peer does not speak a protocol of ours."""

Piece = bytes | bytearray | memoryview
"""Received bytes, as they lie; nobody changes them any more."""


class Stream(Protocol):
    """One reliable, ordered, two-way byte stream to `peer`, whose key the transport has proved.

    Every method raises `Unreachable` when the connection is gone. Cancelling any of them is safe: the stream may be
    unusable afterwards, the connection and its other streams are not.
    """

    @property
    def peer(self) -> str:
        """Authenticated peer id of the other end."""

    async def send_all(self, *data: bytes) -> None:
        """Send everything, in order, waiting for room. Several buffers are sent as if they were one."""

    async def receive_some(self, max_bytes: int) -> bytes:
        """1 to max_bytes bytes; b"" only at the end of the stream (which may also be a peer that died)."""

    async def receive_parts(self, max_bytes: int) -> list[Piece]:
        """As `receive_some`, in the pieces it came in, for one who can do nothing before all `max_bytes` are here.

        It may return fewer all the same. [] only at the end of the stream.
        """

    def keeps(self, count: int) -> None:
        """Of the bytes received, so many are still kept by the reader: they count as unread, until it says 0.

        Whoever sends more than its share by that loses its connection.
        """

    async def close_write(self) -> None:
        """No more bytes from here; the other direction stays open."""

    async def reset(self) -> None:
        """Abandon both directions at once. Never raises, never blocks long; safe to call twice."""


StreamHandler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    """A process's presence on the network, already listening. Made and closed by an async context manager."""

    @property
    def peer_id(self) -> str:
        """Our own peer id."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses we listen on, as others may dial them (multiaddrs without the /p2p part)."""

    def set_handler(self, protocol: ProtocolName, handler: StreamHandler) -> None:
        """Serve inbound streams of `protocol`. An exception in the handler costs that stream, never the host."""

    async def open(self, peer: PeerAddress, protocol: ProtocolName) -> Stream:
        """A new stream to `peer`, dialling if needed. Raises `Unreachable`; bounded by the dial time-out."""

    async def disconnect(self, peer: str) -> None:
        """Close every connection to `peer`. Never raises."""

    def offence(self, peer: str, reason: str) -> None:
        """`peer` broke a protocol. The transport may refuse one that does so again and again. Never raises."""

    def remote(self, peer: str) -> str | None:
        """The IP address from which `peer` is connected, the newest connection's; None: it is not, or none is known.

        A connection through a relay has no address of the peer's own.
        """

    def ban(self, peer: str, reason: str, seconds: float | None = None) -> None:
        """Refuse `peer` from now on, for `seconds` or as long as the transport sees fit, and end its connections."""

    def lift_ban(self, peer: str) -> None:
        """Forgive `peer` everything."""
