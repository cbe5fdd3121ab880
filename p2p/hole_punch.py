"""Direct connections between two peers that can only be reached through a relay: DCUtR's hole punching over TCP.

https://github.com/libp2p/specs/blob/master/relay/DCUtR.md. B was reached through a relay, by A:

    B -> A  CONNECT, B's addresses          B measures the round trip t from here
    A -> B  CONNECT, A's addresses          to here
    B -> A  SYNC                            A dials B at once, B dials A after t/2

Both dial from the port they listen on (SO_REUSEPORT), so that a NAT which maps by inner address alone, or keeps port
numbers, lets the other's SYN in as the answer to ours: then both kernels join the two dials into one connection
(simultaneous open) and A speaks first. Or one of the dials reaches the other's listening port, and is accepted there.

That fails where a NAT gives each destination a port of its own (symmetric), unless the other NAT lets anyone in. It is
tried, three times, and what came of it is kept and told as it was (`PunchOutcome`).

Differing from the specification: in the second try B speaks first. When A's listening port took B's dial, which a full
cone NAT does, A waits to be spoken to and B, which should by the specification, would wait as well.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections import deque
from contextlib import suppress
from dataclasses import astuple
from typing import TYPE_CHECKING

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from .errors import ProtocolError, Truncated, UnexpectedMessage, Unreachable
from .libp2p_tcp import parse_address
from .messages import PeerAddress
from .nat_view import PunchOutcome
from .relay_wire import PUNCH_PROTOCOL, HolePunch, PunchType, encode, read_message

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from .libp2p_tcp import HostPort
    from .relay_host import Host, Link
    from .transport import Stream

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

log = logging.getLogger(__name__)

TRIES_MAX = 3
"""As the specification has it."""

TRY_SECONDS = 4.0
"""One try: a lost first SYN is sent again by the kernel after 1 s and 3 s, so either NAT may open late."""

MESSAGE_SECONDS = 15.0
"""Bound on the other side's next message, over a relay that may be slow."""

REDIAL_SECONDS = 0.2
"""Between dials that were refused: a router without a mapping answers with RST until ours has opened it."""

DIALLED_MAX = 6
"""Addresses of a peer dialled in one try: it may name anyone's, so it gets no more than a few SYNs out of us."""

AGAIN_SECONDS = 60.0
"""A peer's further attempt within this of the last one is refused: see DIALLED_MAX."""

OUTCOMES_MAX = 64
"""Kept for status, the latest ones."""

LOOK_SECONDS = 0.05
"""How often it is looked whether the other side's dial was accepted by our listening port."""

RELAYED_GRACE_SECONDS = 10.0
"""A relayed connection is closed this long after a direct one arose, once nothing uses it."""

_HOME_NETWORKS = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))
)
"""Addresses that mean another machine in every home. Others that are not of the open internet no hint has us dial:
loopback and link-local ones name this very machine and its wire, whoever says them."""

_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            *("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24"),
            *("2620:4f:8000::/48", "3fff::/20"),
        ),
    )
)
"""Special-purpose networks (RFC 6890, 7535, 7450, 7526, 7534, 9637) that some Python versions call global, in part: the
protocols' own, anycast ones that the nearest router may answer, and a documentation network. No peer is there."""

_ISATAP = (0x00005EFE, 0x02005EFE)
"""Bits 64 to 95 of an IPv6 address whose last 32 are an IPv4 address that it is tunnelled to (RFC 5214).

Compatible and translated ones and NAT64's (::/96, ::ffff:0:0:0/96, 64:ff9b::/96) are in 0000::/8, reserved: refused.
"""


class HolePuncher:
    """Tries to replace relayed connections of `host` by direct ones.

    `candidates` are addresses at which the outside may see our listening ports, best first (`Reachability.candidates`).
    `seen_at` says where the coordinator's relay saw a peer, as far as it told (`RelayClient.seen_at`): a peer that is
    seen where we are is behind our own NAT. `open_networks` count as open internet: worlds of tests name some, a daemon
    none.
    """

    def __init__(
        self,
        host: Host,
        *,
        candidates: Callable[[], Sequence[str]],
        clock: Callable[[], float],
        seen_at: Callable[[str], Collection[str]] = lambda _peer: (),
        open_networks: Sequence[str] = (),
    ) -> None:
        self._host = host
        self._candidates = candidates
        self._clock = clock
        self._seen_at = seen_at
        self._open_networks = open_networks
        self._outcomes: dict[str, PunchOutcome] = {}
        self._tried_at: dict[str, deque[float]] = {}
        shared = [share_port(one) for one in host.listening]  # each of them, also after one that cannot be
        self._can_share = all(shared)

    def serve(self) -> None:
        """Take part in the attempts of peers connected through a relay."""
        self._host.set_raw_handler(PUNCH_PROTOCOL, self._asked)

    def view(self) -> tuple[PunchOutcome, ...]:
        """For status: the last attempt with each peer, latest last."""
        return tuple(self._outcomes.values())

    async def met(self, link: Link) -> None:
        """A peer has reached us through a relay: try, and when it worked close the relayed connection."""
        outcome = await self.punch(link.peer)
        if outcome.result == "direct":
            await trio.sleep(RELAYED_GRACE_SECONDS)
            if not link.stream_count:  # else it ends by the relay's limit
                await link.close()

    async def punch(self, peer: str) -> PunchOutcome:
        """B's part, in all tries."""
        ours = self._own_addresses()
        theirs: tuple[str, ...] = ()
        reason = self._hindrance(peer)
        if reason:
            return self._note(PunchOutcome(peer, "not_tried", 0, reason))
        tries = 0
        while tries < TRIES_MAX and self._may_try(peer):
            tries += 1
            try:
                with trio.fail_after(2 * MESSAGE_SECONDS):
                    theirs, lead_seconds = await self._agree(peer, ours)
            except trio.TooSlowError:
                reason = "the peer did not answer over the relay"
                continue
            except (Unreachable, ProtocolError) as error:
                reason = str(error)
                continue
            await trio.sleep(lead_seconds)
            direct, reason = await self._dial_all(peer, theirs, speaks_first=tries % 2 == 0)
            if direct:
                return self._note(PunchOutcome(peer, "direct", tries, reason, ours, theirs))
        if tries == 0:
            return self._note(PunchOutcome(peer, "not_tried", 0, f"tried within the last {AGAIN_SECONDS:.0f} s"))
        return self._note(PunchOutcome(peer, "failed", tries, reason, ours, theirs))

    async def _agree(self, peer: str, ours: tuple[str, ...]) -> tuple[tuple[str, ...], float]:
        """Exchange addresses; returns the peer's and the seconds after which its dial leaves."""
        stream = await self._host.open_raw(PeerAddress(peer=peer), PUNCH_PROTOCOL, relayed=True)
        finished = False
        try:
            sent_at = self._clock()
            await stream.send_all(encode(HolePunch(PunchType.CONNECT, _binaries(ours))))
            answer = await read_message(stream, HolePunch)
            round_trip_seconds = self._clock() - sent_at
            if answer.type is not PunchType.CONNECT:
                raise UnexpectedMessage("SYNC came where CONNECT was expected")
            await stream.send_all(encode(HolePunch(PunchType.SYNC)))
            await stream.close_write()
            finished = True
            return self._dialable(peer, answer), round_trip_seconds / 2
        finally:
            if not finished:
                with trio.CancelScope(shield=True):
                    await stream.reset()

    async def _asked(self, stream: Stream) -> None:
        """A's part, in one try."""
        peer = stream.peer
        if self._host.link_of(stream).via != "relay":
            raise Unreachable("asked for hole punching on a direct connection")
        reason = self._hindrance(peer)
        if reason:
            self._note(PunchOutcome(peer, "not_tried", 0, reason))
        if reason or not self._may_try(peer):
            await stream.reset()
            return
        ours = self._own_addresses()
        try:
            with trio.fail_after(2 * MESSAGE_SECONDS):
                theirs = self._dialable(peer, await read_message(stream, HolePunch))
                await stream.send_all(encode(HolePunch(PunchType.CONNECT, _binaries(ours))))
                if (await read_message(stream, HolePunch)).type is not PunchType.SYNC:
                    raise UnexpectedMessage("CONNECT came where SYNC was expected")
        except Truncated as error:
            raise Unreachable(str(error)) from error
        except trio.TooSlowError as error:
            raise Unreachable(f"{peer} began hole punching and went silent") from error
        except ProtocolError as error:
            self._host.offence(peer, f"hole punching: {error}")
            await stream.reset()
            return
        await stream.close_write()
        tries = len(self._tried_at[peer])
        direct, reason = await self._dial_all(peer, theirs, speaks_first=True)
        self._note(PunchOutcome(peer, "direct" if direct else "failed", tries, reason, ours, theirs))

    async def _dial_all(self, peer: str, addresses: Sequence[str], *, speaks_first: bool) -> tuple[bool, str]:
        """Dial all at once for one try: whether a direct connection arose, by whichever side, and how or why not."""
        failures: dict[str, str] = {}
        arrived: list[Link] = []

        async def dial(address: str, nursery: trio.Nursery) -> None:
            remote = parse_address(address)
            while True:
                failures.setdefault(address, "no answer")
                try:
                    socket_stream = await dial_from(self._host.listening, remote)
                    failures[address] = "connected, but no handshake"
                    if speaks_first:
                        link = await self._host.upgrade_outbound(socket_stream, peer, via="punched")
                    else:
                        link = await self._host.upgrade_inbound(socket_stream, via="punched")
                except OSError as error:
                    failures[address] = os.strerror(error.errno) if error.errno else str(error)
                    await trio.sleep(REDIAL_SECONDS)
                    continue
                except Unreachable as error:
                    failures[address] = str(error)
                    await trio.sleep(REDIAL_SECONDS)
                    continue
                if link.peer == peer:
                    arrived.append(link)
                    nursery.cancel_scope.cancel()
                    return
                failures[address] = f"{link.peer} is there instead"
                await link.close()
                return

        async def look(nursery: trio.Nursery) -> None:
            while self._host.direct_link(peer) is None:  # noqa: ASYNC110 - the host tells nobody of new connections
                await trio.sleep(LOOK_SECONDS)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(TRY_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look, nursery)
                for address in addresses:
                    nursery.start_soon(dial, address, nursery)
        link = arrived[0] if arrived else self._host.direct_link(peer)
        if link is not None:
            return True, "our dial got through" if link.via == "punched" else "its dial reached our listening port"
        told = "; ".join(f"{address}: {why}" for address, why in failures.items())
        return False, told or "the peer named no address that can be dialled"

    def _hindrance(self, peer: str) -> str:
        if self._host.direct_link(peer) is not None:
            return "connected directly already"
        if not self._host.listening:
            return "this process listens on no port to dial from"
        if not self._can_share:
            return "this system does not let a listening port be dialled from"
        return ""

    def _may_try(self, peer: str) -> bool:
        """Count a try, unless there were as many lately."""
        now = self._clock()
        for known in [known for known, times in self._tried_at.items() if times[-1] <= now - AGAIN_SECONDS]:
            del self._tried_at[known]
        tried = self._tried_at.setdefault(peer, deque(maxlen=TRIES_MAX))
        if len(tried) == TRIES_MAX and tried[0] > now - AGAIN_SECONDS:
            return False
        tried.append(now)
        return True

    def _own_addresses(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._candidates(), *self._host.addresses)))[:DIALLED_MAX]

    def _dialable(self, peer: str, message: HolePunch) -> tuple[str, ...]:
        ours, theirs = _numbers(self._candidates()), _numbers(self._seen_at(peer))
        neighbour = not ours.isdisjoint(theirs)
        return dialable(message.addresses, neighbour=neighbour, open_networks=self._open_networks)

    def _note(self, outcome: PunchOutcome) -> PunchOutcome:
        if outcome.result == "not_tried" and outcome.peer in self._outcomes:
            return outcome  # what came of the last attempt says more
        log.info("hole punching with %s: %s after %d tries: %s", *astuple(outcome)[:4])
        self._outcomes.pop(outcome.peer, None)
        self._outcomes[outcome.peer] = outcome
        if len(self._outcomes) > OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]
        return outcome


def dialable(
    addresses: Sequence[bytes], *, neighbour: bool = False, open_networks: Sequence[str] = ()
) -> tuple[str, ...]:
    """Of what a peer names, the first few TCP addresses that may be dialled for it; the order is kept.

    Numbers only: names are not looked up and relays not asked for a peer's hint. Addresses of home networks only for a
    `neighbour`, observed behind our own NAT: anyone else would have us knock at our neighbours' doors. Loopback,
    link-local, multicast and special-purpose ones for nobody, in whatever IPv6 an IPv4 address is wrapped, nor port 0.
    `open_networks` are let through unlooked at: see `HolePuncher`.
    """
    opened = [ipaddress.ip_network(network) for network in open_networks]
    found: dict[str, None] = {}
    for raw in addresses:
        try:
            address = str(Multiaddr(raw))
            remote = parse_address(address)
            host = ipaddress.ip_address(remote.host)
        except (MultiaddrError, ValueError, UnicodeError, KeyError, IndexError):
            continue
        if remote.port == 0:
            continue
        meant = _meant(host)
        near = neighbour and len(meant) == 1  # nobody tunnels to a home network
        if all(_within(one, opened) or _may_be_dialled(one, neighbour=near) for one in meant):
            found[address] = None
    return tuple(found)[:DIALLED_MAX]


def _may_be_dialled(address: IPAddress, *, neighbour: bool) -> bool:
    if _within(address, _HOME_NETWORKS):
        return neighbour
    if _within(address, _SPECIAL):
        return False
    never = address.is_multicast or address.is_reserved or address.is_loopback or address.is_link_local
    old_home = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (never or old_home or address.is_unspecified)


def _meant(address: IPAddress) -> tuple[IPAddress, ...]:
    """What a packet to this address may reach, each of which must be allowed: it, and what IPv4 addresses it wraps."""
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return (address, address.sixtofour)
    if address.teredo is not None:
        return (address, *address.teredo)
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return (address, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return (address,)


def _within(address: IPAddress, networks: Sequence[IPNetwork]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _numbers(addresses: Collection[str]) -> set[IPAddress]:
    """The IP addresses among multiaddrs, unwrapped."""
    found: set[IPAddress] = set()
    for address in addresses:
        with suppress(ValueError):
            found.update(_meant(ipaddress.ip_address(parse_address(address).host)))
    return found


def share_port(listening: trio.socket.SocketType) -> bool:
    """Let this process dial from a port it listens on.

    The option is set only now, after the port was bound without it: so a busy port was an error, and a second process
    is still refused it, since that binds without the option too (Linux checks both sockets).
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        return False
    with suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return True
    return False


async def dial_from(listening: Sequence[trio.socket.SocketType], remote: HostPort) -> trio.SocketStream:
    """Connect to a numeric address from the port of a listening socket of its family. Raises OSError."""
    family = socket.AF_INET6 if ":" in remote.host else socket.AF_INET
    local = next((one for one in listening if one.family == family), None)
    if local is None:
        raise OSError(errno.EAFNOSUPPORT, "we listen on no address of this kind")
    dialling = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await dialling.bind(local.getsockname()[:2])
        await dialling.connect((remote.host, remote.port))
    except BaseException:
        dialling.close()
        raise
    return trio.SocketStream(dialling)


def _binaries(addresses: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(Multiaddr(address).to_bytes() for address in addresses)
