"""Connections that we make: one dial of a peer at a time, back-off, all addresses, then other ways, and a report."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from .dialer import Attempt, DialReport, Endpoint, dial, with_way
from .errors import AnotherPeer, Unreachable
from .libp2p_negotiate import reason_of
from .libp2p_yamux import Traffic, Yamux

if TYPE_CHECKING:
    from .libp2p_pool import Pool
    from .messages import PeerAddress
    from .peer_memory import PeerMemory

SPARE_DIAL_SECONDS = 3.0
"""Bound on one address when there is a connection of the other kind to fall back on: a peer behind NAT came itself."""

DIALS_MAX = 64
"""Addresses being dialled at a time by this process; further ones wait, inside their own time-out."""

REPORTS_MAX = 256
"""Peers whose last dial is remembered in words."""


@dataclass(frozen=True)
class DialStrategy:
    """A way to a peer that cannot be dialled directly. All that are in `dial_strategies` are tried in their order.

    `dial` gets bytes through to the peer, calls `upgrade_outbound` (or, where roles are swapped, `upgrade_inbound`) on
    them and returns its connection. It raises Unreachable, whose text is shown to the user.
    """

    name: str
    dial: Callable[[PeerAddress, Traffic], Awaitable[Yamux]]


class Dialling:
    """Makes connections; `reports` tells of the last attempt for each peer, `strategies` are tried after addresses."""

    def __init__(
        self,
        pool: Pool,
        memory: PeerMemory,
        dial_endpoint: Callable[[Endpoint, str, Traffic], Awaitable[Yamux]],
        raise_if_refused: Callable[[str], None],
    ) -> None:
        self.strategies: list[DialStrategy] = []
        self.reports: OrderedDict[str, DialReport] = OrderedDict()
        self._pool = pool
        self._memory = memory
        self._dial_endpoint = dial_endpoint
        self._raise_if_refused = raise_if_refused
        self._locks: dict[tuple[str, Traffic], trio.Lock] = {}
        self._places = trio.CapacityLimiter(DIALS_MAX)

    async def connect(self, peer: PeerAddress, traffic: Traffic, *, seconds_max: float) -> Yamux:
        """Dial, unless another task is at it: then take its connection. Failing that, one made for other traffic."""
        key = (peer.peer, traffic)
        lock = self._locks.setdefault(key, trio.Lock())
        try:
            async with lock:
                return self._pool.best(peer.peer, traffic) or await self._dial(peer, traffic, seconds_max)
        except Unreachable:
            other = self._pool.best(peer.peer, None)
            if other is None or (traffic == "bulk" and other.via == "relay"):  # a relay pays for what it carries
                raise
            return other
        finally:
            if not lock.locked():
                self._locks.pop(key, None)

    async def _dial(self, peer: PeerAddress, traffic: Traffic, seconds_max: float) -> Yamux:
        if not peer.addresses and not self.strategies:
            raise Unreachable(f"{peer.peer} is not connected and has no address to dial")
        self._raise_if_refused(peer.peer)
        wait = self._memory.back_off_seconds(peer)
        if wait > 0:
            last = self.reports.get(peer.peer)
            tried = last or "failed before the last restart"
            raise _unreachable(f"cannot reach {peer.peer}: the next try is in {wait:.1f} s; the last: {tried}", last)
        began = trio.current_time()
        if self._pool.best(peer.peer, None) is not None:
            seconds_max = min(seconds_max, SPARE_DIAL_SECONDS)

        async def connect(endpoint: Endpoint) -> Yamux:
            async with self._places:
                return await self._dial_endpoint(endpoint, peer.peer, traffic)

        connection, attempts = await dial(peer.addresses, connect, seconds_max=seconds_max, reason=reason_of)
        way = next((each.address for each in attempts if not each.outcome), "")
        for strategy in self.strategies if connection is None else ():
            started = trio.current_time()
            try:
                connection = await strategy.dial(peer, traffic)
                way = strategy.name
                attempts = with_way(attempts, way, started, trio.current_time(), "")
                break
            except Unreachable as error:
                attempts = with_way(attempts, strategy.name, started, trio.current_time(), str(error))
        report = self._report(peer, attempts, trio.current_time() - began, way)
        if connection is None:
            self._memory.failed(peer)
            raise _unreachable(f"cannot reach {peer.peer}: {report}", report)
        if connection.traffic is None:
            connection.traffic = traffic
        return connection

    def _report(self, peer: PeerAddress, attempts: list[Attempt], seconds: float, way: str) -> DialReport:
        report = DialReport(peer.peer, self._memory.wall(), seconds, tuple(attempts), way)
        self.reports.pop(peer.peer, None)
        self.reports[peer.peer] = report
        if len(self.reports) > REPORTS_MAX:
            self.reports.popitem(last=False)
        return report


def _unreachable(text: str, report: DialReport | None) -> Unreachable:
    """With whom was found instead, for callers who can say what that means."""
    other = None if report is None else report.other
    return Unreachable(text) if other is None else AnotherPeer(text, other.other, other.endpoint)
