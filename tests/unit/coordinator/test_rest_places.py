"""Who holds a place at REST, and who gives one up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator.rest_places import ADDRESS_ARRIVALS, ADDRESS_PLACES_MAX, NETWORK_PLACES_MAX, Places

LOCAL = "127.0.0.1"


class House:
    """Places, who was ended in turn, and a clock that moves a second with each arrival."""

    def __init__(self, most=64, proxy=""):
        self.places = Places(most, proxy)
        self.ended = []
        self.now = 0.0

    def come(self, host, name=None):
        self.now += 1.0
        return self.places.enter(host, self.now, lambda: self.ended.append(host if name is None else name))

    def held(self):
        return len(self.places._held)


def test_one_address_has_its_part_and_then_ends_its_own():
    """However many connections it opens, the others keep all their places; one that was proved stays to the last."""
    house = House()
    house.come("203.0.113.7", "mine").proved = 1.0
    for number in range(500):
        house.come("198.51.100.9", number)
    assert house.held() == ADDRESS_PLACES_MAX + 1
    assert house.ended == list(range(500 - ADDRESS_PLACES_MAX))
    house = House()
    first = house.come("198.51.100.9", "operator")
    first.proved = house.now
    for _ in range(500):
        house.come("198.51.100.9")
    assert "operator" not in house.ended


@pytest.mark.parametrize(
    "host", ["198.51.100.{}", "::ffff:198.51.100.{}", "2001:db8:5:{}::1"], ids=["ipv4", "mapped", "ipv6"]
)
def test_one_network_has_its_part(host):
    """A /24, an IPv6 /48: 200 addresses of it have no more than it may have."""
    house = House()
    for number in range(200):
        house.come(host.format(number + 1))
    assert house.held() == NETWORK_PLACES_MAX
    assert house.come("2001:db8:6::1")
    assert house.held() == NETWORK_PLACES_MAX + 1


def test_an_ipv6_site_is_one_address():
    """Its 2^64 addresses of a /64 are one client."""
    house = House()
    for number in range(200):
        house.come(f"2001:db8:5:1::{number:x}")
    assert house.held() == ADDRESS_PLACES_MAX


def test_in_a_full_house_the_most_crowded_network_gives_first():
    """Strangers end each other, those with most places first and of them the oldest; whoever is proved stays."""
    house = House(most=6)
    house.come("203.0.113.1", "proved").proved = 1.0
    house.come(LOCAL, "local")
    for host in ("192.0.2.1", "198.51.100.1", "198.51.100.2", "198.51.100.2"):
        house.come(host)
    house.come("203.0.113.9", "new")
    assert house.ended == ["198.51.100.2"]
    house.come("203.0.113.8")
    assert house.ended == ["198.51.100.2", "198.51.100.1"]


def test_when_all_are_proved_the_one_longest_without_a_request_goes():
    """So whoever comes always gets in, also from an address that has all it may."""
    house = House(most=4)
    proved = [house.come(LOCAL, number) for number in range(4)]
    for place, at in zip(proved, (13.0, 11.0, 12.0, 14.0), strict=True):
        place.proved = at
    house.come("203.0.113.9", "new")
    assert house.ended == [1]
    house.come("203.0.113.10", "newer")
    assert house.ended == [1, "new"], "strangers have the one place that the first of them took"


def test_this_machine_and_the_proxy_are_under_no_cap():
    """Everybody behind the proxy comes from one address; its neighbours in a /64 are not the proxy."""
    house = House(proxy="2001:db8::1")
    for host in (LOCAL, "2001:db8::1", "::ffff:127.0.0.1"):
        for _ in range(20):
            assert house.come(host)
    assert house.ended == []
    assert house.come("2001:db8::2").groups
    assert not house.come("2001:db8::1").groups


def test_who_comes_too_often_is_turned_away():
    """More than the burst at one moment from one address; others are let in, and so is it after a while."""
    house = House()
    let_in = sum(house.places.enter("198.51.100.9", 5.0, int) is not None for _ in range(1000))
    assert abs(let_in - ADDRESS_ARRIVALS.burst) <= 1, "floats round"
    assert house.places.enter("198.51.101.9", 5.0, int)
    assert house.places.enter("198.51.100.9", 5.0 + 2 / ADDRESS_ARRIVALS.per_second, int)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["come", "leave", "prove"]),
            st.sampled_from([LOCAL, "192.0.2.1", "192.0.2.2", "198.51.100.1", "2001:db8::1", "2001:db8:0:1::1"]),
            st.integers(0, 9),
        ),
        max_size=200,
    )
)
def test_nobody_is_counted_twice_or_left_behind(steps):
    """Whatever comes, leaves and proves itself: no more places than there are, the crowd is that of those held, and
    nobody proved is ended while a stranger that has no fewer places than its group may stays."""
    house, held = House(most=8), []
    for what, host, which in steps:
        if what == "come":
            before = len(house.ended)
            strangers = any(place.proved is None for place in held)
            place = house.come(host)
            gone = [each for each in held if each not in house.places._held]
            assert len(gone) == len(house.ended) - before <= 1
            assert not (strangers and any(each.proved is not None for each in gone))
            held = [each for each in held if each in house.places._held] + ([place] if place else [])
        elif held and what == "leave":
            house.places.leave(held.pop(which % len(held)))
        elif held:
            held[which % len(held)].proved = house.now
        assert set(held) == set(house.places._held)
        assert len(held) <= 8
        assert house.places._crowd.total() == sum(len(place.groups) for place in held)
