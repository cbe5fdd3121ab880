"""How much of a pool one key, one address and one network may take. Pure: time is monotonic seconds.

| limit                        | counts                                                              | code            |
|------------------------------|---------------------------------------------------------------------|-----------------|
| hellos of a key              | HELLO_BURST at once, then one in HELLO_SECONDS                      | too_often       |
| new keys of an address, hour | keys that were unknown, IPv4 address or IPv6 /64                    | too_many_keys   |
| new keys of a network, hour  | the same of the /24 or /48, NETWORK_TIMES as many                   | too_many_keys   |
| nodes of an address          | nodes that are heard of, whatever their state                       | address_full    |
| nodes of a network           | the same of the /24 or /48                                          | network_full    |

Loopback is under none of the last four, so that a demo, tests and a proxy on this machine are not in their own way. A
peer whose address is not known any more when its hello is answered counts with all others like it: whoever hangs up at
once must not be under no limit.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from echo2.p2p.errors import Refused
from echo2.p2p.guards import group_of
from echo2.p2p.rates import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Iterable

HELLO_BURST = 20
HELLO_SECONDS = 2.0
"""Hellos of one key: so many at once, then one in so many seconds. A daemon says one when it starts, when its addresses
change and after each lost connection; each may cost a transaction, a new plan and a signature."""

KEYS_MAX = 10_000
"""Whose hellos are counted; beyond, those that were heard of longest ago are forgotten. A key costs a handshake."""

PLACES_MAX = 10_000
"""Addresses and networks whose new keys are counted."""

NETWORK_TIMES = 4
"""New keys of a network against those of one address."""

HOUR_SECONDS = 3600.0

CROWDED_SECONDS = 60.0
"""When a node may come again whose address or network has as many as it may."""

UNKNOWN = ("an address that is not known", "an address that is not known")


@dataclass(frozen=True, slots=True)
class Limits:
    """As `[admission]` sets them."""

    nodes_per_address: int
    nodes_per_network: int
    new_keys_per_hour: int


@lru_cache(PLACES_MAX)
def places(host: str | None) -> tuple[str, str] | None:
    """(address, network) that a peer counts against; None: under no limit."""
    if host is None:
        return UNKNOWN
    return group_of(host)


class HelloRate:
    """A token bucket for each key."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}

    def count(self, peer: str, now: float) -> float:
        """0.0 when this hello may be answered, and counts; else after how many seconds the next one may."""
        full_at = max(self._full_at.pop(peer, now), now)
        wait = full_at - now - (HELLO_BURST - 1) * HELLO_SECONDS
        self._full_at[peer] = full_at if wait > 0 else full_at + HELLO_SECONDS
        while len(self._full_at) > KEYS_MAX:
            del self._full_at[next(iter(self._full_at))]
        return max(wait, 0.0)


class NewKeys:
    """Keys never seen before, by where they come from."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def check(self, host: str | None, now: float) -> None:
        """Raise Refused when one more from there is one too many."""
        for place, most in self._of(host):
            bucket = self._bucket(place, most, now)
            if bucket.tokens(now) < 1:
                raise Refused(
                    "too_many_keys",
                    f"{most} new keys an hour from {place} are let in; use the key you have, or come later",
                    HOUR_SECONDS / most,
                )

    def count(self, host: str | None, now: float) -> None:
        """One more was let in."""
        for place, most in self._of(host):
            self._bucket(place, most, now).spend(1, now)

    def _of(self, host: str | None) -> list[tuple[str, int]]:
        found, most = places(host), self._limits.new_keys_per_hour
        if found is None:
            return []
        narrow, wide = found
        return [(narrow, most)] if narrow == wide else [(narrow, most), (wide, NETWORK_TIMES * most)]

    def _bucket(self, place: str, most: int, now: float) -> TokenBucket:
        bucket = self._buckets.pop(place, None) or TokenBucket(most / HOUR_SECONDS, most, now)
        self._buckets[place] = bucket
        while len(self._buckets) > PLACES_MAX:
            self._buckets.popitem(last=False)
        return bucket


def check_room(host: str | None, others: Iterable[str | None], limits: Limits) -> None:
    """Raise Refused when there are as many live nodes as there may be where `host` is; `others`: where they are."""
    mine = places(host)
    if mine is None:
        return
    narrow, wide = mine
    found = [place for place in map(places, others) if place is not None and place[1] == wide]
    beside = sum(place[0] == narrow for place in found)
    if beside >= limits.nodes_per_address:
        raise Refused("address_full", f"{beside} live nodes come from {narrow} already", CROWDED_SECONDS)
    if len(found) >= limits.nodes_per_network:
        raise Refused("network_full", f"{len(found)} live nodes come from {wide} already", CROWDED_SECONDS)
