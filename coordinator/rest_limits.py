"""How often a client of REST may ask: token buckets. Pure; `now` is monotonic seconds."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

KEYS_MAX = 4096
"""Clients counted at once; beyond, the one heard of longest ago is forgotten, and begins anew with a full bucket."""

IPV6_PREFIX = 64
"""One customer's line has at least so much: its 2^64 addresses are one client."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many at once, and then so many a second."""

    burst: int
    per_second: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one client: a token's name, or an address. Far above what a person, a page or a monitor asks."""

    reads: Rate = Rate(300, 50.0)
    changes: Rate = Rate(60, 5.0)
    logins: Rate = Rate(10, 1 / 6)
    """Attempts to open a session from one address, right or wrong."""
    failures: Rate = Rate(20, 1.0)
    """Requests of one address with a token that is none."""


class Buckets:
    """One bucket a client."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._full_at: dict[str, float] = {}

    def take(self, client: str, now: float) -> float:
        """0.0 when this one may go on, and is counted; else after how many seconds the next may."""
        burst, each = self._rate.burst, 1 / self._rate.per_second
        full_at = max(self._full_at.pop(client, now), now)
        wait = full_at - now - (burst - 1) * each
        self._full_at[client] = full_at if wait > 0 else full_at + each
        while len(self._full_at) > KEYS_MAX:
            del self._full_at[next(iter(self._full_at))]
        return max(wait, 0.0)


def address_in(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text is, out of IPv6 where IPv4 was wrapped in it; None where it is none."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def client_of(address: str) -> str:
    """What an address is counted as."""
    found = address_in(address)
    if found is None:
        return address[:64]
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(found), IPV6_PREFIX), strict=False).network_address)
    return str(found)
