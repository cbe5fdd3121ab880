"""Whose inbound connection ends for the sake of one more. Pure: time is an argument, ending is a callable.

| a place is held by | from                   | it ends                                                    |
|--------------------|------------------------|------------------------------------------------------------|
| a handshake        | accepted               | for another handshake beyond `handshakes_max`              |
| a stranger         | proved a key           | for anybody beyond `strangers_max`; at `STRANGER_SECONDS`  |
| somebody known     | admitted by the daemon | never for another: in a house of those, one more is refused |

Who goes is the oldest one of the network that holds most such places, whatever streams it has open: to be idle is what
an honest node does nearly always, and a silent stream costs a stranger 12 bytes. So an attacker displaces himself, and
`strangers_max` leaves a part of the house to those who are known. Until it is told whom the daemon knows, a transport
tells nobody apart: there is no such bound then, no stranger's time, and those without a stream go first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .guards import group_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .guards import TransportLimits

KNOWN_SHARE = 4
"""One in so many of the places is not for strangers."""

STRANGER_SECONDS = 30.0
"""From a proved key to an agreed hello, which takes a round trip or two."""

LEAVING_MAX = 64
"""Connections that were told to end and have not ended: out of the files that the process keeps for itself."""

HERE = "this machine"


@dataclass(eq=False, slots=True)
class Place:
    """One inbound connection. `end` makes it leave, for the reason given; `idle` says whether it has no stream."""

    network: str
    since: float
    end: Callable[[str], None]
    idle: Callable[[], bool] = lambda: True
    peer: str | None = None
    known: bool = False
    leaving: bool = False


class Places:
    """The inbound connections of one transport. `known` is set by the daemon: whether a peer id is admitted."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._strangers_max = limits.inbound_max - limits.inbound_max // KNOWN_SHARE
        self._places: dict[Place, None] = {}  # oldest first
        self.known: Callable[[str], bool] | None = None

    @property
    def handshakes(self) -> list[Place]:
        """Those not yet authenticated, oldest first."""
        return [place for place in self._places if place.peer is None and not place.leaving]

    def make_room(self) -> bool:
        """Whether one more may come in; somebody else may have been told to leave for it."""
        present = [place for place in self._places if not place.leaving]
        full = len(present) >= self._limits.inbound_max
        strangers = sum(1 for place in present if not place.known)
        if not full and (self.known is None or strangers < self._strangers_max):
            return True
        if len(self._places) - len(present) >= LEAVING_MAX:
            return False
        victim = self._victim(present)
        if victim is None:
            return not full
        _leave(victim, "its place is needed")
        return True

    def enter(self, host: str, now: float, end: Callable[[str], None]) -> Place:
        """A connection was accepted, and begins its handshake. The oldest of the crowd of handshakes may have to go."""
        groups = group_of(host)
        place = Place(HERE if groups is None else groups[1], now, end)
        self._places[place] = None
        shaking = self.handshakes
        if len(shaking) > self._limits.handshakes_max:
            _leave(_oldest_of_most(shaking), "others shake hands")
        return place

    def settle(self, place: Place, peer: str, now: float, end: Callable[[str], None], idle: Callable[[], bool]) -> None:
        """It has proved to be `peer`; in the very moment it was told to leave, perhaps, and then it stays."""
        place.leaving = False
        place.peer, place.since, place.end, place.idle = peer, now, end, idle
        place.known = self.known is not None and self.known(peer)

    def leave(self, place: Place) -> None:
        """It has ended."""
        self._places.pop(place, None)

    def look(self, now: float) -> None:
        """Now and then: who is known by now, or no longer; strangers whose time is over are told to leave."""
        if self.known is None:
            return
        for place in list(self._places):
            if place.peer is None or place.leaving:
                continue
            place.known = self.known(place.peer)
            if not place.known and now - place.since >= STRANGER_SECONDS:
                _leave(place, f"not admitted within {STRANGER_SECONDS:.0f} s")

    def _victim(self, present: list[Place]) -> Place | None:
        strangers = [place for place in present if place.peer is not None and not place.known]
        if self.known is None:
            strangers = [place for place in strangers if place.idle()] or strangers
        while strangers:
            victim = _oldest_of_most(strangers)
            if self.known is None or not self.known(victim.peer or ""):
                return victim
            victim.known = True  # since the last look
            strangers.remove(victim)
        shaking = [place for place in present if place.peer is None]
        return _oldest_of_most(shaking) if shaking else None


def _oldest_of_most(places: Iterable[Place]) -> Place:
    held = Counter(place.network for place in places)
    most = max(held.values())
    return next(place for place in places if held[place.network] == most)


def _leave(place: Place, reason: str) -> None:
    place.leaving = True
    place.end(reason)
