"""The relay's side of circuit relay v2: peers that cannot be dialled reserve a place, others reach them through it.

    client --RESERVE--> relay             "keep a place for me while I stay connected"
    source --CONNECT(target)--> relay --CONNECT(source)--> target, then bytes both ways within `Limit`

The relay sees Noise ciphertext only: the two ends prove their keys to each other inside. What it gives away is its own
line, so all is bounded (`Bounds`): who may ask at all (`may_use`: peers that passed admission), places per network
and in all, circuits per peer, per minute and in all, seconds and bytes of each circuit. A relayed connection is for
meeting and for small control traffic until hole punching has made a direct one; snapshots are never sent over it, and
an address through a relay makes nobody a relay of chunks (`reachability.direct_addresses`).
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from .errors import ProtocolError, Truncated, Unreachable
from .messages import PeerAddress
from .relay_wire import (
    ADDRESSES_MAX,
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    HopMessage,
    HopType,
    Limit,
    Reservation,
    Status,
    StopMessage,
    StopType,
    encode,
    read_message,
)
from .unread import Unread

if TYPE_CHECKING:
    from collections.abc import Callable

    from .relay_host import Host
    from .transport import Stream

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Bound on a peer's next message: a few round trips, however far away it is."""

UNREAD_MAX = 64
"""Requests being read at once. They come in one round trip; who stays silent gives way to who speaks."""

PIECE_BYTES = 64 * 1024
"""Carried at once, so held in memory per direction of a circuit: one yamux frame."""

MINUTE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a relay gives away, at most."""

    reservations: int = 256
    """Places in all. A place is a table entry; it is the connection that must be kept beside it that costs."""

    reservations_per_network: int = 32
    """Places for one /24 or /48: as many as a lab or a provider's NAT shares, too few to take every place."""

    reservation_seconds: float = 3600.0
    """The specification's suggestion. The place of a peer whose connection ends is free at once."""

    circuits: int = 64
    """Relayed connections at a time, in all."""

    circuits_per_peer: int = 4
    """Those of one peer, as source and as target each: as many connections as a pair of peers keeps."""

    connects_per_minute: int = 8
    """Asked for by one source: a relayed connection refused after its bytes are spent is not simply made anew."""

    limit: Limit = field(default_factory=lambda: Limit(duration_seconds=600, data_bytes=4 << 20))
    """Of one circuit. Ten minutes and 4 MiB: hole punching needs 3 s and 2 KiB; the rest is for small control messages
    of a pair that cannot do without. With the other bounds: at most 4 x 4 MiB at once for any peer."""


class RelayTable:
    """Places and circuits; pure, `now` is monotonic seconds. A peer has at most one place; asking again renews it."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._places: dict[str, tuple[float, str]] = {}  # peer -> (until, network)
        self._circuits: Counter[tuple[str, str]] = Counter()
        self._asked: dict[str, deque[float]] = {}

    @property
    def reservations(self) -> int:
        """Places taken."""
        return len(self._places)

    @property
    def holders(self) -> tuple[str, ...]:
        """Peers that have a place."""
        return tuple(self._places)

    @property
    def circuits(self) -> int:
        """Relayed connections now."""
        return self._circuits.total()

    def reserve(self, peer: str, network: str, now: float) -> Status:
        """Give or renew a place."""
        self.expire(now)
        others = [place for holder, place in self._places.items() if holder != peer]
        if len(others) >= self._bounds.reservations:
            return Status.RESERVATION_REFUSED
        if sum(1 for _, known in others if known == network) >= self._bounds.reservations_per_network:
            return Status.RESERVATION_REFUSED
        self._places[peer] = (now + self._bounds.reservation_seconds, network)
        return Status.OK

    def release(self, peer: str) -> None:
        """The peer's connection is gone, and its place with it."""
        self._places.pop(peer, None)

    def connect(self, source: str, target: str, now: float) -> Status:
        """Count one more circuit from `source` to `target`, or say why not. Every OK is ended by `disconnect`."""
        self.expire(now)
        asked = self._asked.setdefault(source, deque(maxlen=self._bounds.connects_per_minute))
        if len(asked) == self._bounds.connects_per_minute:
            return Status.RESOURCE_LIMIT_EXCEEDED
        asked.append(now)
        if target not in self._places or source == target:
            return Status.NO_RESERVATION
        from_source = sum(count for (one, _), count in self._circuits.items() if one == source)
        to_target = sum(count for (_, other), count in self._circuits.items() if other == target)
        if max(from_source, to_target) >= self._bounds.circuits_per_peer or self.circuits >= self._bounds.circuits:
            return Status.RESOURCE_LIMIT_EXCEEDED
        self._circuits[source, target] += 1
        return Status.OK

    def disconnect(self, source: str, target: str) -> None:
        """A circuit ended."""
        self._circuits[source, target] -= 1
        if self._circuits[source, target] <= 0:
            del self._circuits[source, target]

    def expire(self, now: float) -> None:
        """Forget what is over."""
        for peer in [peer for peer, (until, _) in self._places.items() if until <= now]:
            del self._places[peer]
        for peer in [peer for peer, times in self._asked.items() if times and times[0] <= now - MINUTE_SECONDS]:
            times = self._asked[peer]
            while times and times[0] <= now - MINUTE_SECONDS:
                times.popleft()
            if not times:
                del self._asked[peer]


def network_of(host: str) -> str:
    """The /24 of an IPv4 address, the /48 of an IPv6 one; anything else stands for itself."""
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


@dataclass(frozen=True, slots=True)
class RelayView:
    """For status: what this relay gives away now, what it carried, whom it refused and why."""

    reservations: int
    circuits: int
    circuits_opened: int
    carried_bytes: int
    refused: dict[str, int]


class Relay:
    """Serves hop requests on `host`. `wall` is unix time: expiry is told in it, counted in `clock`."""

    def __init__(
        self,
        host: Host,
        *,
        may_use: Callable[[str], bool],
        clock: Callable[[], float],
        wall: Callable[[], float],
        bounds: Bounds | None = None,
    ) -> None:
        self._host = host
        self._may_use = may_use
        self._clock = clock
        self._wall = wall
        self._bounds = bounds or Bounds()
        self._table = RelayTable(self._bounds)
        self._opened = 0
        self._carried_bytes = 0
        self._refused: Counter[str] = Counter()
        self._unread = Unread(UNREAD_MAX)

    def serve(self) -> None:
        """Register with the host."""
        self._host.set_raw_handler(HOP_PROTOCOL, self._hop)

    def view(self) -> RelayView:
        """For status."""
        self._table.expire(self._clock())
        return RelayView(
            self._table.reservations, self._table.circuits, self._opened, self._carried_bytes, dict(self._refused)
        )

    async def _hop(self, stream: Stream) -> None:
        message: HopMessage | None = None
        try:
            with self._unread.place(stream.peer), trio.move_on_after(ANSWER_SECONDS):
                message = await read_message(stream, HopMessage)
        except Truncated:
            return
        except ProtocolError as error:
            self._host.offence(stream.peer, f"hop request: {error}")
            await self._answer(stream, Status.MALFORMED_MESSAGE)
            return
        if message is None:  # it did not come, or its place was needed
            await stream.reset()
        elif self._host.link_of(stream).via == "relay" or not self._may_use(stream.peer):
            # A relay of relays would hide who asks and multiply what is given away.
            await self._answer(stream, Status.PERMISSION_DENIED)
        elif message.type is HopType.RESERVE:
            await self._reserve(stream)
        elif message.type is HopType.CONNECT and message.peer is not None:
            await self._connect(stream, message.peer)
        else:
            await self._answer(stream, Status.UNEXPECTED_MESSAGE)

    async def _reserve(self, stream: Stream) -> None:
        seen = self._host.remote_of(self._host.link_of(stream))
        if self._table.reservations >= self._bounds.reservations:
            self._release_absent()
        status = self._table.reserve(stream.peer, network_of(seen.host) if seen else "?", self._clock())
        if status is not Status.OK:
            await self._answer(stream, status)
            return
        reply = HopMessage(
            type=HopType.STATUS,
            reservation=Reservation(
                expires_unix_seconds=int(self._wall() + self._bounds.reservation_seconds),
                addresses=self._own_addresses(),
            ),
            limit=self._bounds.limit,
            status=Status.OK,
        )
        await stream.send_all(encode(reply))
        await stream.close_write()

    async def _connect(self, source: Stream, target_peer: str) -> None:
        if self._host.direct_link(target_peer) is None:
            self._table.release(target_peer)
        status = self._table.connect(source.peer, target_peer, self._clock())
        if status is not Status.OK:
            await self._answer(source, status)
            return
        try:
            target = await self._stopped_at(target_peer, source.peer)
            if target is None:
                await self._answer(source, Status.CONNECTION_FAILED)
                return
            self._opened += 1
            try:
                reply = HopMessage(
                    type=HopType.STATUS,
                    peer=target_peer,
                    limit=self._bounds.limit,
                    status=Status.OK,
                    peer_addresses=self._shared_place(target_peer, source.peer),
                )
                await source.send_all(encode(reply))
                why = await self._carry(source, target)
                log.debug("circuit from %s to %s ended: %s", source.peer, target_peer, why)
            finally:
                with trio.CancelScope(shield=True):
                    await target.reset()
                    await source.reset()
        finally:
            self._table.disconnect(source.peer, target_peer)

    async def _stopped_at(self, target: str, source: str) -> Stream | None:
        """The target's end of a new circuit, once it agreed."""
        stream: Stream | None = None
        agreed = False
        try:
            with trio.move_on_after(ANSWER_SECONDS):
                stream = await self._host.open_raw(PeerAddress(peer=target), STOP_PROTOCOL, relayed=False)
                shared = self._shared_place(source, target)
                request = StopMessage(StopType.CONNECT, source, self._bounds.limit, peer_addresses=shared)
                await stream.send_all(encode(request))
                answer = await read_message(stream, StopMessage)
                agreed = answer.type is StopType.STATUS and answer.status is Status.OK
        except (Unreachable, ProtocolError) as error:
            log.debug("%s takes no circuit from %s: %s", target, source, error)
        if agreed:
            return stream
        if stream is not None:
            await stream.reset()
        return None

    def _shared_place(self, peer: str, reader: str) -> tuple[bytes, ...]:
        """Where we see `peer`, if we see `reader` at the same address: they are neighbours, and neither learns more."""
        seen = [self._host.remote_of(link) for link in map(self._host.direct_link, (peer, reader)) if link is not None]
        hosts = {where.host for where in seen if where is not None}
        if len(seen) < 2 or None in seen or len(hosts) != 1 or seen[0] is None:
            return ()
        try:
            kind = "ip6" if ":" in seen[0].host else "ip4"
            return (Multiaddr(f"/{kind}/{seen[0].host}/tcp/{seen[0].port}").to_bytes(),)
        except (MultiaddrError, ValueError):
            return ()  # an address with a zone: of this wire alone

    async def _carry(self, source: Stream, target: Stream) -> str:
        """Both directions, under one limit, until both have ended or it is reached. Returns what ended it."""
        limit = self._bounds.limit
        left = limit.data_bytes or None
        why = "both sides were done"

        async def one_way(reader: Stream, writer: Stream, nursery: trio.Nursery) -> None:
            nonlocal left, why
            try:
                while data := await reader.receive_some(PIECE_BYTES):
                    if left is not None:
                        if len(data) > left:
                            why = f"its {limit.data_bytes} bytes were spent"
                            nursery.cancel_scope.cancel()
                            return
                        left -= len(data)
                    await writer.send_all(data)
                    self._carried_bytes += len(data)
                await writer.close_write()
            except Unreachable as error:
                why = str(error)
                nursery.cancel_scope.cancel()

        with trio.move_on_after(limit.duration_seconds or float("inf")) as in_time:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one_way, source, target, nursery)
                nursery.start_soon(one_way, target, source, nursery)
        return f"its {limit.duration_seconds} s were over" if in_time.cancelled_caught else why

    async def _answer(self, stream: Stream, status: Status) -> None:
        self._refused[status.name.lower()] += 1
        await stream.send_all(encode(HopMessage(type=HopType.STATUS, status=status)))
        await stream.close_write()

    def _own_addresses(self) -> tuple[bytes, ...]:
        """Binary multiaddrs with our peer id, from which clients make theirs."""
        whole = (f"{address}/p2p/{self._host.peer_id}" for address in self._host.addresses[:ADDRESSES_MAX])
        return tuple(Multiaddr(address).to_bytes() for address in whole)

    def _release_absent(self) -> None:
        for peer in self._table.holders:
            if self._host.direct_link(peer) is None:
                self._table.release(peer)
