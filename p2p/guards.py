"""What strangers may cost us: caps, bans and back-off. Pure: time is an argument, in seconds of any one clock.

| guard     | against                                                   | what it decides                           |
|-----------|-----------------------------------------------------------|-------------------------------------------|
| Admission | many connections from one place                           | whether one more may come in              |
| Buffers   | bytes sent to us faster than we read them                 | which connection has to go                |
| Nuisance  | frames, streams that are allowed, cost us, serve no one   | when a connection has sent too many       |
| Bans      | a peer that breaks the protocol again and again           | until when it is refused                  |
| BackOff   | our own eagerness towards a peer that cannot be reached   | when it may be dialled again              |

All keep a bounded number of records; when one more comes, the one that matters least goes.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .rates import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

MIB = 1024 * 1024

RECORDS_MAX = 4096
"""Peers remembered in each of the bans, offences and back-offs: some hundred KB, more than any pool's real trouble."""

REASON_CHARACTERS_MAX = 200
"""Kept of a reason: it may quote what the peer sent."""

OFFENCES_MAX = 5
"""Protocol errors of one peer within `OFFENCE_SECONDS` that cost a ban: a version mismatch or a torn link makes one."""

OFFENCE_SECONDS = 600.0

BAN_SECONDS = 600.0
"""The first ban; each further one within a day is twice as long."""

BAN_SECONDS_MAX = 86_400.0
"""No ban lasts longer: a mended node may come back the next day without anyone's help."""

FREE_FAILURES = 3
"""Failed dials in a row that cost no wait: a peer that restarts is reached at once when it is back."""

BACK_OFF_SECONDS = 0.5
"""The first wait; it doubles with each failure."""

BACK_OFF_SECONDS_MAX = 8.0
"""The longest wait: how long after its return a peer may stay unreached because of us. Below one heartbeat."""

BACK_OFF_FORGET_SECONDS = 86_400.0
"""A failure older than this says nothing any more."""


@dataclass(frozen=True)
class TransportLimits:
    """What a transport may spend on its peers. The defaults suit a node and a coordinator of some hundred nodes."""

    inbound_max: int = 1024
    """Inbound connections at a time: keeps us below common limits on open files."""

    handshakes_max: int = 128
    """Inbound connections not yet authenticated. One more ends the oldest of the network with most of them."""

    per_address_max: int = 64
    """Inbound connections from one address: a household or a small lab behind one NAT, two for each node."""

    per_network_max: int = 256
    """Inbound connections from one /24 (IPv6: one /64 is one site and counts as an address)."""

    arrivals_per_second: float = 5.0
    """Inbound connections a second from one address, after a burst of `per_address_max`: a handshake costs us 3 ms."""

    network_arrivals_per_second: float = 20.0
    """And from one /24 or /48, after a burst of `per_network_max`: a /48 holds 65,536 addresses of that kind."""

    offences_max: int = OFFENCES_MAX
    """Protocol errors of one peer in ten minutes that cost a ban."""

    loopback_exempt: bool = True
    """Processes of this machine (a demo, a reverse proxy) are under no cap per address."""

    per_peer_connections_max: int = 6
    """Control and bulk, dialled by either side at once, and what a restart left dead. Beyond: the oldest goes."""

    per_peer_streams_max: int = 256
    """Streams of one peer being served, over all its connections, dead ones included; beyond, a new one is reset."""

    connection_buffer_bytes_max: int = 64 * MIB
    """Received and unread on one connection; beyond, the connection ends. 8 streams at their widest windows."""

    buffer_bytes_max: int = 512 * MIB
    """Received and unread in the whole process; beyond, the connection that holds most ends."""

    connection_unsent_bytes_max: int = 64 * MIB
    """Given to one connection to be sent, and not yet taken by its peer; beyond, the connection ends."""

    unsent_bytes_max: int = 512 * MIB
    """The same of the whole process; beyond, a connection ends that takes nothing, the one with most of it first."""

    upload_bits_per_second: float | None = None
    """Cap on what we send, all peers together; None: what the line takes."""

    download_bits_per_second: float | None = None
    """Cap on what we receive."""


# Connections.


def group_of(host: str) -> tuple[str, str] | None:
    """(address, network) an inbound connection counts against: IPv4 and its /24; IPv6 its /64 and its /48.

    An IPv6 site gets a /64 at least, so one address of it says nothing. None for loopback and what is not an address.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return None
    narrow, wide = (32, 24) if address.version == 4 else (64, 48)
    return tuple(str(ipaddress.ip_network((address, bits), strict=False)) for bits in (narrow, wide))  # type: ignore[return-value]


class Admission:
    """Counts inbound connections by where they come from."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._counts: Counter[str] = Counter()
        self._arrivals: tuple[OrderedDict[str, TokenBucket], ...] = (OrderedDict(), OrderedDict())
        self.total = 0

    def enter(self, host: str, now: float, make_room: Callable[[], bool] | None = None) -> str | None:
        """Count one more from `host`; or why it may not come in, and then it is not counted.

        `make_room` is asked last, and may end another one for it; without it, `inbound_max` is a plain bound.
        """
        limits = self._limits
        groups = self._groups(host)
        for group, most in zip(groups, (limits.per_address_max, limits.per_network_max), strict=False):
            if self._counts[group] >= most:
                return f"{most} connections from {group} are open"
        for group in self._too_often(groups, now):
            return f"{group} connects too often"
        if not (self.total < limits.inbound_max if make_room is None else make_room()):
            return f"{limits.inbound_max} inbound connections are open"
        self.total += 1
        self._counts.update(groups)
        return None

    def leave(self, host: str) -> None:
        """The connection ended. Once for each `enter` that said yes."""
        self.total -= 1
        for group in self._groups(host):
            self._counts[group] -= 1
            if self._counts[group] <= 0:
                del self._counts[group]

    @property
    def places(self) -> Mapping[str, int]:
        """Connections by address and network."""
        return dict(self._counts)

    def _too_often(self, groups: tuple[str, ...], now: float) -> tuple[str, ...]:
        """The first of the groups that connects too often. The address does not pay for what its network refuses."""
        limits = self._limits
        rates = (limits.arrivals_per_second, limits.network_arrivals_per_second)
        bursts = (limits.per_address_max, limits.per_network_max)
        buckets: list[TokenBucket] = []
        for known, group, rate, burst in reversed(list(zip(self._arrivals, groups, rates, bursts, strict=False))):
            bucket = known.pop(group, None) or TokenBucket(rate, burst, now)
            known[group] = bucket
            if len(known) > RECORDS_MAX:
                known.popitem(last=False)
            if bucket.tokens(now) < 1:
                return (group,)
            buckets.append(bucket)
        for bucket in buckets:
            bucket.spend(1, now)
        return ()

    def _groups(self, host: str) -> tuple[str, ...]:
        groups = group_of(host)
        if groups is None:
            return () if self._limits.loopback_exempt else ("this machine",)
        return groups


# Memory.


class Buffers:
    """Bytes received and not yet read, or given to be sent and not yet taken, by connection and together."""

    def __init__(self, *, each_max: int, total_max: int, first: Callable[[Any], bool] = lambda _key: False) -> None:
        """Beyond `total_max` the holder of most ends; of those for whom `first` says so, if there are any."""
        self._first = first
        self._each_max = each_max
        self._total_max = total_max
        self._held: dict[Hashable, int] = {}
        self.total = 0

    def take(self, key: Hashable, count: int) -> Hashable | None:
        """`key` holds `count` more. Returns who must end for it, if anyone; their bytes count until `drop`."""
        held = self._held.get(key, 0) + count
        self._held[key] = held
        self.total += count
        if held > self._each_max:
            return key
        if self.total > self._total_max:
            return max(self._held, key=lambda each: (self._first(each), self._held[each]))
        return None

    def give(self, key: Hashable, count: int) -> None:
        """`count` of them were read or dropped."""
        held = self._held.get(key)
        if held is None:  # the connection is gone, what was left of it was given back by `drop`
            return
        count = min(count, held)
        self.total -= count
        if held == count:
            del self._held[key]
        else:
            self._held[key] = held - count

    def drop(self, key: Hashable) -> None:
        """The connection is gone with all it held."""
        self.total -= self._held.pop(key, 0)

    def held(self, key: Hashable) -> int:
        """What `key` holds now."""
        return self._held.get(key, 0)


NUISANCE_BURST = 20_000
"""Pings, resets, empty frames at once: 0.1 s of our processor."""

NUISANCE_PER_SECOND = 200.0
"""And for as long as the connection lives; ten times a busy honest peer's."""


FRUITLESS_BURST = 64
"""Streams of one connection that end without a protocol, at once: a request that its asker gives up may be one."""

FRUITLESS_PER_SECOND = 2.0
"""And for as long as the connection lives: each costs us a task and 0.1 ms."""


class Nuisance:
    """Counts what is allowed and serves no one, frames unless said; `one_more` says when it is too much."""

    def __init__(self, now: float, per_second: float = NUISANCE_PER_SECOND, burst: int = NUISANCE_BURST) -> None:
        self._bucket = TokenBucket(per_second, burst, now)

    def one_more(self, now: float) -> bool:
        """Whether the peer has gone too far."""
        if self._bucket.tokens(now) < 1:
            return True
        self._bucket.spend(1, now)
        return False


# Bans.


@dataclass(frozen=True)
class Ban:
    """Who is refused until when, and why."""

    peer: str
    until: float
    reason: str
    times: int
    """Bans of this peer so far, this one included."""


class Bans:
    """Peers refused for a while. Times are wall-clock seconds, as they outlive a restart."""

    def __init__(self, offences_max: int = OFFENCES_MAX) -> None:
        self._offences_max = offences_max
        self._bans: OrderedDict[str, Ban] = OrderedDict()
        self._offences: OrderedDict[str, list[float]] = OrderedDict()

    def offence(self, peer: str, reason: str, now: float) -> Ban | None:
        """`peer` broke the protocol once more; the ban, when that was once too often.

        Nothing while it is banned: what it sent before that, all at once, is one misdeed.
        """
        if self.find(peer, now):
            return None
        recent = [at for at in self._offences.pop(peer, []) if 0 <= now - at < OFFENCE_SECONDS]
        recent = [*recent[-self._offences_max :], now]
        if len(recent) >= self._offences_max:
            return self.ban(peer, f"{len(recent)} protocol errors, the last: {reason}", now)
        self._offences[peer] = recent
        if len(self._offences) > RECORDS_MAX:
            self._offences.popitem(last=False)
        return None

    def ban(self, peer: str, reason: str, now: float, *, seconds: float | None = None) -> Ban:
        """Refuse `peer` from now on, for `seconds` or for twice as long as the last time."""
        before = self._bans.pop(peer, None)
        times = 1 + (before.times if before and now < before.until + BAN_SECONDS_MAX else 0)
        lasting = BAN_SECONDS * 2 ** min(times - 1, 32) if seconds is None else seconds
        made = Ban(peer, now + min(lasting, BAN_SECONDS_MAX), reason[:REASON_CHARACTERS_MAX], times)
        self._bans[peer] = made
        if len(self._bans) > RECORDS_MAX:
            del self._bans[min(self._bans, key=lambda each: self._bans[each].until)]
        return made

    def lift(self, peer: str) -> None:
        """Forgive everything."""
        self._bans.pop(peer, None)
        self._offences.pop(peer, None)

    def find(self, peer: str, now: float) -> Ban | None:
        """The ban in force. One that ends further off than any can was made under a wrong clock, and is over."""
        found = self._bans.get(peer)
        return found if found is not None and now < found.until <= now + BAN_SECONDS_MAX else None

    def current(self, now: float) -> list[Ban]:
        """All bans in force."""
        return [ban for ban in self._bans.values() if self.find(ban.peer, now)]

    def remembered(self, now: float) -> list[Ban]:
        """Those in force, and those over that still make the next one longer: what a restart must not forget."""
        return [ban for ban in self._bans.values() if now < ban.until + BAN_SECONDS_MAX]

    def recall(self, ban: Ban) -> None:
        """Put back what was remembered."""
        if len(self._bans) < RECORDS_MAX:
            self._bans[ban.peer] = ban


# Back-off.


@dataclass(frozen=True)
class Failing:
    """A peer that could not be dialled."""

    peer: str
    addresses: tuple[str, ...]
    failures: int
    failed_at: float
    retry_at: float


class BackOff:
    """When a peer may be dialled again. Times are wall-clock seconds, as they outlive a restart.

    A peer known under other addresses than those that failed may be dialled at once.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        """`random` gives numbers in [0, 1): waits are spread so that a pool does not return in one instant."""
        self._random = random
        self._failing: OrderedDict[str, Failing] = OrderedDict()

    def wait(self, peer: str, addresses: tuple[str, ...], now: float) -> float:
        """Seconds until it may be dialled; 0: now."""
        found = self._failing.get(peer)
        if found is None or found.addresses != addresses or now < found.failed_at:
            return 0.0
        return max(0.0, found.retry_at - now)

    def failed(self, peer: str, addresses: tuple[str, ...], now: float) -> Failing:
        """A dial of all `addresses` failed."""
        before = self._failing.pop(peer, None)
        known = before is not None and before.addresses == addresses and self._fresh(before, now)
        failures = 1 + (before.failures if before is not None and known else 0)
        doublings = failures - FREE_FAILURES - 1
        lasting = 0.0
        if doublings >= 0:
            lasting = min(BACK_OFF_SECONDS_MAX, BACK_OFF_SECONDS * 2 ** min(doublings, 32))
        made = Failing(peer, addresses, failures, now, now + lasting * (1 - self._random() / 2))
        self._failing[peer] = made
        if len(self._failing) > RECORDS_MAX:
            self._failing.popitem(last=False)
        return made

    def succeeded(self, peer: str) -> bool:
        """It was reached, or came to us: whether anything was forgotten by that."""
        return self._failing.pop(peer, None) is not None

    def remembered(self, now: float) -> list[Failing]:
        """What a restart must not forget."""
        return [found for found in self._failing.values() if self._fresh(found, now)]

    def recall(self, failing: Failing) -> None:
        """Put back what was remembered."""
        if len(self._failing) < RECORDS_MAX:
            self._failing[failing.peer] = failing

    @staticmethod
    def _fresh(found: Failing, now: float) -> bool:
        return 0 <= now - found.failed_at < BACK_OFF_FORGET_SECONDS
