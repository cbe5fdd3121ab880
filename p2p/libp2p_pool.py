"""The connections there are, and which of them a new stream is opened on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .libp2p_yamux import Traffic, Via, Yamux

_WORST_FIRST: tuple[Via, ...] = ("relay", "punched", "direct")


class Pool:
    """Connections by peer, oldest first. Control and bulk have each their own, so that neither waits for the other.

    A connection made by the other side is taken for control until a stream on it says what it is for.
    """

    def __init__(self, per_peer_max: int, end: Callable[[Yamux], None]) -> None:
        """`end` closes a connection that is one too many."""
        self.by_peer: dict[str, list[Yamux]] = {}
        self._per_peer_max = per_peer_max
        self._end = end

    def __iter__(self) -> Iterator[Yamux]:
        """All of them."""
        return iter([one for known in self.by_peer.values() for one in known])

    def add(self, connection: Yamux) -> None:
        """A new one; beyond the cap the oldest goes that is not the only one of its kind."""
        known = self.by_peer.setdefault(connection.peer, [])
        known.append(connection)
        if len(known) > self._per_peer_max:
            newer = [(one.traffic == "bulk", one.via) for one in known]
            spare = (one for n, one in enumerate(known) if newer[n] in newer[n + 1 :])
            self._end(next(spare, known[0]))

    def remove(self, connection: Yamux) -> None:
        """It ended."""
        known = self.by_peer[connection.peer]
        known.remove(connection)
        if not known:
            del self.by_peer[connection.peer]

    def best(self, peer: str, traffic: Traffic | None) -> Yamux | None:
        """The most direct and newest one for `traffic` (None: for any). Bulk goes through no relay."""
        fit = [
            one
            for one in self.by_peer.get(peer, ())
            if one.usable and (traffic is None or (one.traffic == "bulk") == (traffic == "bulk"))
            if traffic != "bulk" or one.via != "relay"
        ]
        return max(reversed(fit), key=lambda one: _WORST_FIRST.index(one.via), default=None)

    async def close_idle(self, idle_seconds: float) -> None:
        """Close those that had no stream for so long."""
        for one in self:
            if not one.keep and not one.stream_count and trio.current_time() - one.used_at > idle_seconds:
                await one.close()
