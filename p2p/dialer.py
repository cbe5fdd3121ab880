"""Reaching a peer at several addresses at once, and saying what was tried (RFC 8305, "happy eyeballs").

`Race` is the pure plan: addresses go off one after another, IPv6 and IPv4 in turn, the next one `STAGGER_SECONDS` after
the last or as soon as it failed; none is given up before its time because another has begun. Names are looked up
meanwhile and join when they are known. `dial` is the shell around it. The first connection wins, the rest is dropped.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import trio

from .errors import AnotherPeer
from .libp2p_tcp import parse_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

C = TypeVar("C")

STAGGER_SECONDS = 0.25
"""RFC 8305's Connection Attempt Delay: a good first address wins before a second one is bothered."""

RESOLVE_SECONDS = 5.0
"""Bound on looking up a name."""

ENDPOINTS_MAX = 32
"""Tried for one peer. A peer announces 16 addresses at most; a hostile name may resolve to any number."""

REASON_CHARACTERS_MAX = 200
"""Kept of a reason: it may quote what the other end sent."""

CIRCUIT = "/p2p-circuit"
"""An address with this part leads through a relay: not dialled here."""

UNFINISHED = "given up: another address was faster"


@dataclass(frozen=True)
class Endpoint:
    """One place to dial. `address` is the multiaddr it comes from."""

    address: str
    host: str
    port: int

    def __str__(self) -> str:
        """`192.0.2.1:4001`, `[2001:db8::1]:4001`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Attempt:
    """What came of one address, name or way. `started_seconds` after the dial began."""

    address: str
    endpoint: str
    started_seconds: float
    seconds: float
    outcome: str
    """Empty: it connected. Else why not, in words."""

    other: str = ""
    """The peer id of whom was found there instead; empty: nobody else was."""

    def __str__(self) -> str:
        """One part of the error that a person reads."""
        where = f" ({self.endpoint})" if self.endpoint and self.endpoint not in self.address else ""
        return f"{self.address}{where}: {self.outcome or 'connected'}"


@dataclass(frozen=True)
class DialReport:
    """The last attempt to reach a peer: all that was tried, and what came of it."""

    peer: str
    at: float
    """Wall-clock seconds."""

    seconds: float
    attempts: tuple[Attempt, ...]
    via: str
    """What connected; empty: nothing did."""

    @property
    def other(self) -> Attempt | None:
        """The first attempt that found another peer."""
        return next((attempt for attempt in self.attempts if attempt.other), None)

    def __str__(self) -> str:
        """For people."""
        tried = "; ".join(str(attempt) for attempt in self.attempts) or "it has no address to dial"
        return f"reached by {self.via} ({tried})" if self.via else tried


class Race:
    """Which endpoint to start when. Pure: time is an argument."""

    def __init__(self, addresses: Sequence[str], now: float) -> None:
        self.attempts: list[Attempt] = []
        self.names: dict[str, tuple[str, int]] = {}
        """Addresses whose host is a name still to be looked up: (host, port)."""
        self._began = now
        self._queues: dict[bool, deque[Endpoint]] = {True: deque(), False: deque()}  # by "is IPv6"
        self._ipv6_next = True
        self._running: dict[Endpoint, float] = {}
        self._seen: set[tuple[str, int]] = set()
        self._next_at = now
        for address in dict.fromkeys(addresses):
            if CIRCUIT in address:
                continue
            try:
                host, port = parse_address(address)
            except ValueError as error:
                self._note(address, "", now, now, str(error))
                continue
            if address.startswith(("/ip4/", "/ip6/")):
                self._queue(Endpoint(address, host, port))
            else:
                self.names[address] = (host, port)

    @property
    def over(self) -> bool:
        """Nothing runs, waits or is looked up."""
        return not (self._running or self.names or any(self._queues.values()))

    def next(self, now: float) -> Endpoint | None:
        """The endpoint to start now, if any."""
        if now < self._next_at or not any(self._queues.values()):
            return None
        queue = self._queues[self._ipv6_next] or self._queues[not self._ipv6_next]
        endpoint = queue.popleft()
        self._ipv6_next = ":" not in endpoint.host
        self._running[endpoint] = now
        self._next_at = now + STAGGER_SECONDS
        return endpoint

    def seconds_until_next(self, now: float) -> float | None:
        """How long nothing is to be started unless something happens; None: until then."""
        return max(0.0, self._next_at - now) if any(self._queues.values()) else None

    def resolved(self, address: str, hosts: Sequence[str]) -> None:
        """A name was looked up."""
        known = self.names.pop(address, None)
        if known is not None:  # None: another address has won meanwhile
            for host in hosts:
                self._queue(Endpoint(address, host, known[1]))

    def unresolved(self, address: str, reason: str, now: float) -> None:
        """A name could not be looked up."""
        known = self.names.pop(address, None)
        if known is not None:
            self._note(address, known[0], self._began, now, reason)

    def ended(self, endpoint: Endpoint, reason: str, now: float, *, other: str = "") -> None:
        """An attempt ended; `reason` is empty when it connected, `other` is another peer that was found there.

        The next one need not wait for its time.
        """
        started = self._running.pop(endpoint, None)
        if started is None:  # it ended in the instant in which another won
            return
        self._note(endpoint.address, str(endpoint), started, now, reason, other)
        self._next_at = now

    def give_up(self, now: float) -> None:
        """Something has won: the others are dropped."""
        for endpoint, started in self._running.items():
            self._note(endpoint.address, str(endpoint), started, now, UNFINISHED)
        self._running.clear()
        self.names.clear()
        for queue in self._queues.values():
            queue.clear()

    def _queue(self, endpoint: Endpoint) -> None:
        place = (endpoint.host, endpoint.port)
        if place not in self._seen and len(self._seen) < ENDPOINTS_MAX:
            self._seen.add(place)
            self._queues[":" in endpoint.host].append(endpoint)

    def _note(self, address: str, endpoint: str, started: float, now: float, reason: str, other: str = "") -> None:
        short = " ".join(reason.split())[:REASON_CHARACTERS_MAX]
        self.attempts.append(Attempt(address, endpoint, started - self._began, now - started, short, other))


async def dial(
    addresses: Sequence[str],
    connect: Callable[[Endpoint], Awaitable[C]],
    *,
    seconds_max: float,
    resolve: Callable[[str, str], Awaitable[list[str]]] | None = None,
    reason: Callable[[BaseException], str] = str,
) -> tuple[C | None, list[Attempt]]:
    """The first connection, or None; and what was tried. Each endpoint gets `seconds_max`. Raises nothing of theirs.

    `connect` owns what it opens and closes it when it is cancelled. `resolve` is given the kind of a name (`dns`,
    `dns4`, `dns6`) and the name.
    """
    clock = trio.current_time
    race = Race(addresses, clock())
    won: list[C] = []
    changed = trio.Event()
    look_up = resolve or resolve_name

    async def attempt(endpoint: Endpoint) -> None:
        failure = other = ""
        try:
            with trio.fail_after(seconds_max):
                won.append(await connect(endpoint))
        except trio.TooSlowError:
            failure = f"no answer within {seconds_max:g} s"
        except Exception as error:  # noqa: BLE001 - whatever the other end made libp2p raise, this address failed
            failure = reason(error) or type(error).__name__
            other = error.found if isinstance(error, AnotherPeer) else ""
        race.ended(endpoint, failure, clock(), other=other)
        changed.set()

    async def name(address: str) -> None:
        kind, host = address.split("/")[1:3]
        try:
            with trio.fail_after(RESOLVE_SECONDS):
                hosts = await look_up(kind, host)
            if hosts:
                race.resolved(address, hosts)
            else:
                race.unresolved(address, "the name has no address", clock())
        except trio.TooSlowError:
            race.unresolved(address, f"the name was not found within {RESOLVE_SECONDS:g} s", clock())
        except (OSError, UnicodeError) as error:
            race.unresolved(address, f"the name was not found: {reason(error)}", clock())
        changed.set()

    async with trio.open_nursery() as nursery:
        for address in list(race.names):
            nursery.start_soon(name, address)
        while not won and not race.over:
            changed = trio.Event()
            endpoint = race.next(clock())
            if endpoint is not None:
                nursery.start_soon(attempt, endpoint)
                continue
            pause = race.seconds_until_next(clock())
            with trio.move_on_after(float("inf") if pause is None else pause):
                await changed.wait()
        race.give_up(clock())
        nursery.cancel_scope.cancel()
    return (won[0] if won else None), race.attempts


async def resolve_name(kind: str, host: str) -> list[str]:
    """The addresses behind a name: of both families for `dns`, else of one. Raises OSError."""
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, socket.AF_UNSPEC)
    found = await trio.socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def with_way(attempts: Sequence[Attempt], name: str, started: float, now: float, outcome: str) -> list[Attempt]:
    """`attempts` and one that was no address: a relay, or hole punching."""
    begun = max((each.started_seconds + each.seconds for each in attempts), default=0.0)
    short = " ".join(outcome.split())[:REASON_CHARACTERS_MAX]
    return [*attempts, replace(Attempt(name, "", begun, now - started, ""), outcome=short)]
