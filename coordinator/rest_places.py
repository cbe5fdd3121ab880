"""Who holds a place at REST, and who gives one up for whom. Pure; `now` is monotonic seconds.

A place is one connection. It is *proved* once a request on it was answered that had a right to be: by a token, a
session, or where reading is open to this machine's processes. So strangers never keep an operator out:

| a connection comes from                  | then                                            |
|------------------------------------------|-------------------------------------------------|
| an address that came too often of late   | it is turned away                               |
| an address that has ADDRESS_PLACES_MAX   | one of that address gives up its place for it   |
| a network that has NETWORK_PLACES_MAX    | one of that network does                        |
| anywhere, while every place is taken     | one of all does                                 |

Which one: of those not proved, the one of the most crowded network, then address, that came first; if all are proved,
the one for which that is the longest ago. Processes of this machine, and the proxy, have no cap, and of those not
proved they are the last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo2.p2p.guards import group_of

from .rest_limits import Buckets, Rate, address_in

if TYPE_CHECKING:
    from collections.abc import Callable

ADDRESS_PLACES_MAX = 24
"""Of one IPv4 address or IPv6 /64: an office behind one NAT, each browser with 6."""

NETWORK_PLACES_MAX = 40
"""Of one /24 or /48. Well below all places, so that one network's strangers end each other and nobody else."""

ADDRESS_ARRIVALS = Rate(96, 12.0)
"""Connections of one address: a greeting over TLS costs us some milliseconds, and honest clients keep theirs open."""

NETWORK_ARRIVALS = Rate(192, 48.0)


@dataclass(eq=False, slots=True)
class Place:
    """One connection's. `end` is called when it must go."""

    groups: tuple[str, ...]
    """Its address and network; none for those that are under no cap."""
    came: float
    end: Callable[[], None]
    proved: float | None = field(default=None)


class Places:
    """At most `most` at a time. `proxy`: the address of a proxy that brings everybody else's requests."""

    def __init__(self, most: int, proxy: str = "") -> None:
        self._most = most
        self._proxy = address_in(proxy)
        self._held: dict[Place, None] = {}
        self._crowd: Counter[str] = Counter()
        self._arrivals = (Buckets(ADDRESS_ARRIVALS), Buckets(NETWORK_ARRIVALS))

    def enter(self, host: str, now: float, end: Callable[[], None]) -> Place | None:
        """A place for a connection from `host`, and the end of whoever gives it up; None: it comes too often."""
        groups = () if self._proxy and address_in(host) == self._proxy else group_of(host) or ()
        if any(bucket.take(group, now) for bucket, group in zip(self._arrivals, groups, strict=False)):
            return None
        caps = (*zip(groups, (ADDRESS_PLACES_MAX, NETWORK_PLACES_MAX), strict=False),)
        full = next((group for group, most in caps if self._crowd[group] >= most), None)
        if full is not None or len(self._held) >= self._most:
            weakest = min((place for place in self._held if full is None or full in place.groups), key=self._standing)
            self.leave(weakest)
            weakest.end()
        place = Place(groups, now, end)
        self._held[place] = None
        self._crowd.update(groups)
        return place

    def leave(self, place: Place) -> None:
        """It is free again. Twice does no harm."""
        if place in self._held:
            del self._held[place]
            self._crowd.subtract(place.groups)
            self._crowd += Counter()  # without those at 0

    def _standing(self, place: Place) -> tuple[bool, bool, int, int, float]:
        """The least goes first."""
        if place.proved is not None:
            return True, True, 0, 0, place.proved
        address, network = (self._crowd[group] for group in place.groups) if place.groups else (0, 0)
        return False, not place.groups, -network, -address, place.came
