"""How much of a pool one place may take."""

from __future__ import annotations

import pytest

from echo2.coordinator.admission_limits import HOUR_SECONDS, PLACES_MAX, Limits, NewKeys, check_room
from echo2.p2p.errors import Refused

LIMITS = Limits(nodes_per_address=2, nodes_per_network=3, new_keys_per_hour=4)


def code(function, *args):
    """Why it refuses, never for good; empty when it does not."""
    try:
        function(*args)
    except Refused as refused:
        return refused.code if refused.retry_seconds else f"{refused.code}, for good"
    return ""


@pytest.mark.parametrize(
    ("host", "others", "refused"),
    [
        ("192.0.2.1", ["192.0.2.1"], ""),
        ("192.0.2.1", ["192.0.2.1"] * 2, "address_full"),
        ("192.0.2.1", ["192.0.2.2"] * 2, ""),
        ("192.0.2.1", ["192.0.2.2"] * 3, "network_full"),
        ("192.0.2.1", ["198.51.100.1"] * 9, ""),
        ("::ffff:192.0.2.1", ["192.0.2.1"] * 2, "address_full"),
        ("2001:db8:1:1::5", ["2001:db8:1:1::6"] * 2, "address_full"),  # one /64 is one house
        ("2001:db8:1:1::5", ["2001:db8:1:2::6"] * 3, "network_full"),  # one /48 is one site
        ("2001:db8:1:1::5", ["2001:db8:2:1::6"] * 9, ""),
        ("127.0.0.1", ["127.0.0.1"] * 99, ""),
        ("::1", ["127.0.0.1"] * 99, ""),
        (None, [None], ""),
        (None, [None] * 2, "address_full"),  # whoever hangs up before his answer is under a limit too
        ("192.0.2.1", [None] * 9, ""),
    ],
)
def test_live_nodes_of_a_place(host, others, refused):
    """Address and network, of both kinds of addresses; this machine is under none."""
    assert code(check_room, host, others, LIMITS) == refused


def test_new_keys_of_an_address_by_the_hour():
    """Four at once, then one each quarter of an hour; its neighbours are not in its way until the network is full."""
    keys = NewKeys(LIMITS)
    for _ in range(4):
        keys.check("192.0.2.1", 0.0)
        keys.count("192.0.2.1", 0.0)
    assert code(keys.check, "192.0.2.1", 1.0) == "too_many_keys"
    for neighbour in range(2, 5):
        assert code(keys.check, f"192.0.2.{neighbour}", 1.0) == ""
        for _ in range(4):
            keys.count(f"192.0.2.{neighbour}", 1.0)
    assert code(keys.check, "192.0.2.9", 1.0) == "too_many_keys"
    assert code(keys.check, "198.51.100.1", 1.0) == ""
    assert code(keys.check, "192.0.2.1", 1.0 + HOUR_SECONDS / 4) == ""


def test_a_check_costs_nothing():
    """Who is turned away for another reason is no worse off."""
    keys = NewKeys(LIMITS)
    for _ in range(100):
        keys.check("192.0.2.1", 0.0)


def test_this_machine_may_have_any_number_of_keys():
    """A demo of a hundred nodes, a test, a proxy."""
    keys = NewKeys(LIMITS)
    for _ in range(100):
        keys.check("127.0.0.1", 0.0)
        keys.count("127.0.0.1", 0.0)


def test_places_are_bounded():
    """An attacker with endless addresses costs us a bounded table."""
    keys = NewKeys(LIMITS)
    for number in range(PLACES_MAX + 10):
        keys.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
    assert len(keys._buckets) == PLACES_MAX
