"""The two ends of a relayed connection: keeping a place at a relay, being reached through it, reaching others so.

An address through a relay is `/ip4/192.0.2.1/tcp/4001/p2p/RELAY/p2p-circuit`, with or without `/p2p/TARGET` after it.
What the relay carries is secured once more end to end, so a relay can cut a connection but neither read nor forge it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from .errors import ProtocolError, Unreachable
from .libp2p_tcp import parse_address
from .messages import PeerAddress
from .nat_view import PlaceView
from .relay_wire import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    HopMessage,
    HopType,
    Reservation,
    Status,
    StopMessage,
    StopType,
    encode,
    read_message,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .libp2p_yamux import Traffic
    from .relay_host import Host, Link
    from .transport import Stream

log = logging.getLogger(__name__)

ANSWER_SECONDS = 15.0
"""Bound on the relay's answer: above the relay's own bound on the target's, so that its reason is heard."""

RENEW_SECONDS_MIN = 30.0
RENEW_SECONDS_MAX = 1800.0
"""A place is asked for again after half its life, within these: the relay's clock and ours need not agree."""

RETRY_SECONDS_MAX = 300.0
"""Asking a relay that refused or cannot be reached backs off from RENEW_SECONDS_MIN to this."""

LOST_SECONDS = 1.0
"""Before asking again on a new connection: one that is cut each time shall not be made anew in a circle."""

RELAYS_TRIED_MAX = 3
"""Of a peer's addresses through relays, one after the other: each costs a stranger's relay something."""

SEEN_MAX = 256
"""Peers of which it is kept where they were seen: more than a relay gives places to the neighbours of one NAT."""

_CIRCUIT = "/p2p-circuit"


def is_relayed(address: str) -> bool:
    """Whether an address leads through a relay."""
    return _CIRCUIT in address


def relayed_address(relay: PeerAddress) -> tuple[str, ...]:
    """Our addresses through `relay`, for others to dial."""
    return tuple(f"{address}/p2p/{relay.peer}{_CIRCUIT}" for address in relay.addresses)


def relay_of(address: str) -> PeerAddress:
    """The relay of an address through one. Raises ValueError; addresses are foreign."""
    before, found, after = address.partition(_CIRCUIT)
    direct, separator, peer = before.rpartition("/p2p/")
    if not (found and separator) or (after and not after.startswith("/p2p/")):
        raise ValueError(f"{address!r} is not an address through a relay")
    parse_address(direct)
    return PeerAddress(peer=peer, addresses=(direct,))


class RelayClient:
    """Reaches and is reached through relays, on `host`. `believed` is the relay whose word counts in `seen_at`."""

    def __init__(self, host: Host, *, wall: Callable[[], float], believed: str = "") -> None:
        self._host = host
        self._wall = wall
        self._believed = believed
        self._seen_at: dict[str, tuple[str, ...]] = {}
        self._relays: dict[str, PlaceView] = {}
        self._met: Callable[[Link], Awaitable[None]] | None = None

    def serve(self, met: Callable[[Link], Awaitable[None]] | None = None) -> None:
        """Take connections through the relays that hold a place for us. `met` runs beside each until it ends."""
        self._met = met
        self._host.set_raw_handler(STOP_PROTOCOL, self._stop)

    def view(self) -> tuple[PlaceView, ...]:
        """For status."""
        return tuple(self._relays.values())

    def seen_at(self, peer: str) -> tuple[str, ...]:
        """Where the believed relay saw `peer` when it last connected us; told of those seen where we are, else ()."""
        return self._seen_at.get(peer, ())

    def _note_seen(self, relay: str, peer: str, addresses: tuple[bytes, ...]) -> None:
        self._seen_at.pop(peer, None)
        if relay != self._believed or not addresses:
            return
        with suppress(MultiaddrError, ValueError, UnicodeError, KeyError, IndexError):
            self._seen_at[peer] = tuple(str(Multiaddr(address)) for address in addresses)
        while len(self._seen_at) > SEEN_MAX:
            del self._seen_at[next(iter(self._seen_at))]

    async def keep_place(self, relay: PeerAddress) -> None:
        """Have a place at `relay`, for ever; again at once when the connection to it was lost."""
        wait_seconds = RENEW_SECONDS_MIN
        while True:
            try:
                reservation = await self.reserve(relay)
            except (Unreachable, ProtocolError) as error:
                self._relays[relay.peer] = PlaceView(relay.peer, held=False, reason=str(error))
                await trio.sleep(wait_seconds)
                wait_seconds = min(2 * wait_seconds, RETRY_SECONDS_MAX)
                continue
            wait_seconds = RENEW_SECONDS_MIN
            life_seconds = reservation.expires_unix_seconds - self._wall()
            with trio.move_on_after(min(max(life_seconds / 2, RENEW_SECONDS_MIN), RENEW_SECONDS_MAX)):
                link = self._host.direct_link(relay.peer)
                if link is not None:
                    link.keep = True
                    await self._host.wait_closed(link)
                self._relays[relay.peer] = PlaceView(relay.peer, held=False, reason="the connection to it was lost")
                await trio.sleep(LOST_SECONDS)

    async def reserve(self, relay: PeerAddress) -> Reservation:
        """Ask for a place once. Raises Unreachable, with the relay's reason when it refused."""
        with trio.move_on_after(ANSWER_SECONDS):
            stream = await self._host.open_raw(relay, HOP_PROTOCOL, relayed=False)
            try:
                await stream.send_all(encode(HopMessage(HopType.RESERVE)))
                answer = await read_message(stream, HopMessage)
            finally:
                with trio.CancelScope(shield=True):
                    await stream.reset()
            if answer.type is not HopType.STATUS or answer.status is not Status.OK or answer.reservation is None:
                raise Unreachable(f"relay {relay.peer} gives no place: {_named(answer.status)}")
            self._relays[relay.peer] = PlaceView(relay.peer, held=True, reason="", limit=answer.limit)
            return answer.reservation
        raise Unreachable(f"relay {relay.peer} did not answer within {ANSWER_SECONDS:.0f} s")

    async def dial(self, peer: PeerAddress, traffic: Traffic = "control") -> Link:
        """A connection through the first relay, of those among its addresses, that carries one. Raises Unreachable."""
        if traffic == "bulk":
            raise Unreachable("megabytes are not sent through a relay")
        failures: list[str] = []
        for address in [one for one in peer.addresses if is_relayed(one)][:RELAYS_TRIED_MAX]:
            try:
                return await self._dial_through(relay_of(address), peer.peer)
            except (Unreachable, ProtocolError, ValueError) as error:
                failures.append(str(error))
        raise Unreachable("; ".join(failures) or f"no relay is known for {peer.peer}")

    async def _dial_through(self, relay: PeerAddress, peer: str) -> Link:
        if relay.peer in (peer, self._host.peer_id):
            raise Unreachable(f"{relay.peer} cannot be the relay of this connection")
        with trio.move_on_after(ANSWER_SECONDS):
            stream = await self._host.open_raw(relay, HOP_PROTOCOL, relayed=False)
            taken = False
            try:
                await stream.send_all(encode(HopMessage(HopType.CONNECT, peer)))
                answer = await read_message(stream, HopMessage)
                if answer.type is not HopType.STATUS or answer.status is not Status.OK:
                    raise Unreachable(f"relay {relay.peer}: {_named(answer.status)}")
                self._note_seen(relay.peer, peer, answer.peer_addresses)
                taken = True
            finally:
                if not taken:
                    with trio.CancelScope(shield=True):
                        await stream.reset()
            return await self._host.upgrade_outbound(stream, peer, via="relay")
        raise Unreachable(f"no connection to {peer} through relay {relay.peer} within {ANSWER_SECONDS:.0f} s")

    async def _stop(self, stream: Stream) -> None:
        """Someone wants us through a relay. Lives as long as the connection: when it returns, its stream ends."""
        link: Link | None = None
        with trio.move_on_after(ANSWER_SECONDS):
            try:
                message = await read_message(stream, StopMessage)
            except ProtocolError as error:
                self._host.offence(stream.peer, f"stop request: {error}")
                await self._answer(stream, Status.MALFORMED_MESSAGE)
                return
            place = self._relays.get(stream.peer)
            if place is None or not place.held:
                # Strangers would otherwise bring us connections whose addresses we cannot see.
                await self._answer(stream, Status.PERMISSION_DENIED)
                return
            if message.type is not StopType.CONNECT or message.peer is None:
                await self._answer(stream, Status.UNEXPECTED_MESSAGE)
                return
            self._note_seen(stream.peer, message.peer, message.peer_addresses)
            await stream.send_all(encode(StopMessage(StopType.STATUS, status=Status.OK)))
            link = await self._host.upgrade_inbound(stream, via="relay")
            if link.peer != message.peer:  # harmless, since the key counts; but a relay that lies is not worth keeping
                log.warning("relay %s announced %s and brought %s", stream.peer, message.peer, link.peer)
                await link.close()
                return
        if link is None:
            await stream.reset()
            return
        async with trio.open_nursery() as nursery:
            if self._met is not None:
                nursery.start_soon(self._met, link)
            await self._host.wait_closed(link)
            nursery.cancel_scope.cancel()

    async def _answer(self, stream: Stream, status: Status) -> None:
        await stream.send_all(encode(StopMessage(StopType.STATUS, status=status)))
        await stream.close_write()


def _named(status: Status | None) -> str:
    return "it answered out of turn" if status is None else status.name.lower().replace("_", " ")
