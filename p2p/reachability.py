"""Whether others can dial us, as the coordinator saw by trying; and so which addresses we may tell them.

    node -> coordinator   DialBackRequest: ports we listen on
    coordinator           dials each at the address it sees the node at, and nothing else; the node must prove its key
    coordinator -> node   DialBackReply: where we are seen, the ports that led to us

The request holds no addresses, so nobody can have a third party dialled. The dial comes from a new port of the
coordinator's; a NAT that lets in whatever its inside has talked to, from any port (address-restricted), would pass it:
for TCP such NATs are rare, and a node found unreachable by the others is only passed over by them.

A node behind NAT announces nothing and so is a leaf of the broadcast. `Reachability.candidates` says where the outside
may see its listening ports all the same: for hole punching, never for announcing.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import trio
from pydantic import Field

from .channel import Channel, answering
from .errors import ProtocolError, Refused, SchemaViolation, Unreachable
from .hole_punch import dial_from, share_port
from .libp2p_tcp import HostPort, parse_address
from .messages import KIB, Address, Message
from .nat_view import ReachabilityView
from .relay_client import is_relayed
from .unread import Unread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .channel import Complaint
    from .messages import PeerAddress
    from .relay_host import Host, Link
    from .transport import Stream

log = logging.getLogger(__name__)

REACHABILITY_PROTOCOL: Final = "/echo2/reachability/1"

PORTS_MAX = 4
"""Ports of one request: IPv4 and IPv6, and a forwarded one beside each."""

PROVE_SECONDS = 5.0
"""Bound on one dial back: a port behind a NAT swallows it, and the asker waits."""

PROVING_MAX = 8
"""Dials back at a time, in all, and one at a time for each peer; further ones wait within their request's time-out.

So whoever asks for ports that swallow each dial holds one place, however often it asks, and waits behind the others."""

REQUESTS_PER_MINUTE = 6
"""Of one peer: a check needs two, a network change one more check. Each costs us up to PORTS_MAX dials."""

CHECK_SECONDS = 900.0
"""Between checks: routers restart and forwardings lapse, but seldom."""

STRANGERS_UNREAD_MAX = 64
"""Requests, of 1 KiB at most, of peers that may not ask, read at a time: enough that each hears why it is refused."""

REQUEST_SECONDS = 2 * PORTS_MAX * PROVE_SECONDS
"""Bound on an answer: the dials back one after the other, and as much again of waiting for a turn."""

RETRY_SECONDS = 60.0
"""After a check that came to nothing because the coordinator could not be asked."""


class DialBackRequest(Message):
    """A peer asks which of its ports can be dialled from outside."""

    TYPE = "dial-back"
    BYTES_MAX = 1 * KIB
    ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65_535)], ...], Field(max_length=PORTS_MAX)] = ()


class DialBackReply(Message):
    """Where the asker is seen (its connection's address and port), and the ports at which it was found."""

    TYPE = "dial-back-reply"
    BYTES_MAX = 1 * KIB
    observed: Address
    ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65_535)], ...], Field(max_length=PORTS_MAX)] = ()


def multiaddr_of(where: HostPort) -> str:
    """`/ip4/192.0.2.1/tcp/4001`; an IPv4 address mapped into IPv6 is one of IPv4."""
    host = where.host.removeprefix("::ffff:") if "." in where.host else where.host
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{where.port}"


def direct_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Without those through a relay: only who has a direct address may be asked for chunks."""
    return tuple(address for address in addresses if not is_relayed(address))


class DialBack:
    """The coordinator's side: dials back whoever asks, remembers what it found, and tells `found` of news."""

    def __init__(
        self,
        host: Host,
        *,
        may_ask: Callable[[str], bool],
        clock: Callable[[], float],
        found: Callable[[str], None] = lambda _peer: None,
    ) -> None:
        self._host = host
        self._may_ask = may_ask
        self._clock = clock
        self._found_news = found
        self._asked: dict[str, deque[float]] = {}
        self._proved: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._unread = Unread(STRANGERS_UNREAD_MAX)
        self._proving = trio.CapacityLimiter(PROVING_MAX)
        self._turns: dict[str, trio.Lock] = {}

    def serve(self, complain: Complaint) -> None:
        """Register with the host."""

        async def handle(stream: Stream) -> None:
            link = self._host.link_of(stream)

            async def answer(peer: str, request: DialBackRequest) -> DialBackReply:
                return await self._answer(peer, self._host.remote_of(link), request)

            waits = PORTS_MAX * PROVE_SECONDS
            handler = answering(
                DialBackRequest, answer, complain,
                wait_seconds=waits, allowed=self._refused, unread=self._unread,
            )  # fmt: skip
            await handler(stream)

        self._host.set_raw_handler(REACHABILITY_PROTOCOL, handle)

    def proved(self, peer: str) -> tuple[str, ...]:
        """Addresses at which `peer` was found within the last three checks' time."""
        at, addresses = self._proved.get(peer, (float("-inf"), ()))
        return addresses if at > self._clock() - 3 * CHECK_SECONDS else ()

    def _forget_old(self) -> None:
        now = self._clock()
        for known in [known for known, (at, _) in self._proved.items() if at <= now - 3 * CHECK_SECONDS]:
            del self._proved[known]

    def _refused(self, peer: str) -> Refused | None:
        if self._may_ask(peer):
            return None
        return Refused("not_admitted", "only admitted peers are dialled back", RETRY_SECONDS)

    async def _answer(self, peer: str, seen: HostPort | None, request: DialBackRequest) -> DialBackReply:
        if seen is None:
            raise Refused("relayed", "you are connected through a relay: your own address is not seen", RETRY_SECONDS)
        refused = self._refused(peer)
        if refused is not None:
            raise refused
        self._count(peer)
        found: list[int] = []
        for port in dict.fromkeys(request.ports):
            if await self._found(peer, HostPort(seen.host, port)):
                found.append(port)
        if request.ports:
            before = self.proved(peer)
            addresses = tuple(multiaddr_of(HostPort(seen.host, port)) for port in found)
            self._forget_old()
            self._proved[peer] = (self._clock(), addresses)
            if addresses != before:
                self._found_news(peer)
        return DialBackReply(observed=multiaddr_of(seen), ports=tuple(found))

    async def _found(self, peer: str, where: HostPort) -> bool:
        turn = self._turns.setdefault(peer, trio.Lock())
        try:
            async with turn, self._proving:  # a peer queues for a place once: the queue is one of peers
                with trio.move_on_after(PROVE_SECONDS):
                    try:
                        await self._host.proves(peer, where)
                    except (Unreachable, OSError) as error:
                        log.debug("dialling %s back: %s", peer, error)
                    else:
                        return True
            return False
        finally:
            if not turn.locked():
                self._turns.pop(peer, None)

    def _count(self, peer: str) -> None:
        now = self._clock()
        for known in [known for known, times in self._asked.items() if times[-1] <= now - 60.0]:
            del self._asked[known]
        asked = self._asked.setdefault(peer, deque(maxlen=REQUESTS_PER_MINUTE))
        if len(asked) == REQUESTS_PER_MINUTE and asked[0] > now - 60.0:
            raise Refused("too_often", f"at most {REQUESTS_PER_MINUTE} dials back a minute", RETRY_SECONDS)
        asked.append(now)


class Reachability:
    """The node's side. `wanted` are the addresses it would announce: those of its settings, or where it listens."""

    def __init__(self, host: Host, coordinator: PeerAddress, *, wanted: Sequence[str]) -> None:
        self._host = host
        self._coordinator = coordinator
        self._wanted = direct_addresses(wanted)
        self._mapping: tuple[Link, str] | None = None
        self._soon = trio.Event()
        self._view = ReachabilityView(unproved=self._wanted)

    def view(self) -> ReachabilityView:
        """For status."""
        return self._view

    @property
    def addresses(self) -> tuple[str, ...]:
        """What may be announced."""
        return self._view.proved

    def candidates(self) -> tuple[str, ...]:
        """Where the outside may see our listening ports, likeliest first."""
        view = self._view
        guesses = [*view.proved]
        if view.mapped is not None:
            guesses.append(view.mapped)
        if view.observed is not None:  # most NATs keep the port number while it is free
            seen = parse_address(view.observed).host
            guesses += [multiaddr_of(HostPort(seen, port)) for port in self._listening_ports()]
        return tuple(dict.fromkeys(guesses))

    def check_soon(self) -> None:
        """The coordinator may have forgotten us, or we may be elsewhere: do not wait for the next check's time."""
        self._soon.set()

    async def keep_checking(self, checked: Callable[[], None], changed: Callable[[], None]) -> None:
        """Check now and again for ever. `checked` after each answer, `changed` when the proved addresses are others."""
        while True:
            before = self.addresses
            try:
                await self.check()
            except (Unreachable, ProtocolError, Refused) as error:
                # What was proved stays announced: it is the coordinator that is gone, not our address.
                self._view = replace(self._view, reason=str(error))
                await self._pause(RETRY_SECONDS)
                continue
            checked()
            if self.addresses != before:
                changed()
            await self._pause(CHECK_SECONDS)

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._soon.wait()
        self._soon = trio.Event()

    async def check(self) -> ReachabilityView:
        """Ask once. Raises Unreachable, Refused or ProtocolError."""
        ports = dict.fromkeys((*(_port(address) for address in self._wanted), *self._listening_ports()))
        link = self._host.direct_link(self._coordinator.peer) or await self._host.connect(self._coordinator)
        reply = await self._ask(link, DialBackRequest(ports=tuple(ports)[:PORTS_MAX]))
        seen = parse_address(reply.observed).host
        proved = dict.fromkeys(multiaddr_of(HostPort(seen, port)) for port in reply.ports if port in ports)
        unproved = tuple(address for address in self._wanted if address not in proved)
        self._view = ReachabilityView(
            reachable=bool(proved),
            observed=reply.observed,
            mapped=None if proved else await self._mapped(link),
            proved=tuple(proved),
            unproved=unproved,
            reason="" if proved else _why_not(seen, tuple(ports)),
        )
        return self._view

    async def _mapped(self, link: Link) -> str | None:
        """Dial the coordinator from the listening port; where is that seen? The connection keeps the mapping."""
        if self._mapping is not None and self._mapping[0].closed is None:
            return self._mapping[1]
        self._mapping = None
        where = self._host.remote_of(link)
        if where is None or not all(map(share_port, self._host.listening)):
            return None
        try:
            with trio.move_on_after(PROVE_SECONDS):
                stream = await dial_from(self._host.listening, where)
                second = await self._host.upgrade_outbound(stream, self._coordinator.peer)
                second.keep = True
                observed = (await self._ask(second, DialBackRequest())).observed
                self._mapping = (second, observed)
                return observed
        except (OSError, Unreachable, ProtocolError, Refused) as error:
            log.debug("dialling from the listening port: %s", error)
        return None

    async def _ask(self, link: Link, request: DialBackRequest) -> DialBackReply:
        with trio.move_on_after(REQUEST_SECONDS):
            stream = await self._host.open_on(link, REACHABILITY_PROTOCOL)
            try:
                channel = Channel(stream)
                await channel.send(request, end=True)
                reply = await channel.receive(DialBackReply)
                await channel.receive_end()
                await channel.close()
                parse_address(reply.observed)
                return reply
            except ValueError as error:
                raise SchemaViolation(f"observed at {error}") from error
            finally:
                with trio.CancelScope(shield=True):
                    await stream.reset()
        raise Unreachable(f"the coordinator did not say within {REQUEST_SECONDS:.0f} s whether it reaches us")

    def _listening_ports(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(one.getsockname()[1] for one in self._host.listening))


def _why_not(seen: str, ports: tuple[int, ...]) -> str:
    if not ports:
        return "this process listens on no port"
    return f"dialled back at {seen}, nothing led here from port {', '.join(map(str, ports))}"


def _port(address: str) -> int:
    return parse_address(address).port
