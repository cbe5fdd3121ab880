"""Hole punching where nothing is in the way, where something is, and what is said of it."""

from __future__ import annotations

import ipaddress

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr
from unit.p2p.relay_places import ALICE, BOB, CAROL, RELAY, place, relayed

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.hole_punch import DIALLED_MAX, HolePuncher, dialable
from echo2.p2p.relay_host import Libp2pHost
from echo2.p2p.relay_wire import HolePunch, PunchType


def binary(*addresses):
    return [Multiaddr(address).to_bytes() for address in addresses]


def test_only_numbers_that_are_somebodys_are_dialled_for_a_peer():
    """Names, datagrams, multicast, rubbish and other homes' networks are left out, and the list is cut."""
    home = "/ip4/192.168.1.1/tcp/80"
    assert dialable(binary(home)) == ()
    good = [f"/ip4/8.8.8.8/tcp/{port}" for port in range(1, 20)]
    assert dialable(binary(home, good[0]), neighbour=True) == (home, good[0])
    bad = ["/dns/example.org/tcp/1", "/ip4/224.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1", "/ip4/8.8.8.8/udp/1"]
    raw = [b"", b"\xff\xff", b"\x04\x01", *binary(*bad, *good)]
    assert dialable(raw) == tuple(good[:DIALLED_MAX])


WRAPPINGS = (
    "::{}",
    "::ffff:{}",
    "::ffff:0:{}",
    "64:ff9b::{}",
    "64:ff9b:1::{}",
    "2606:4700::5efe:{}",
    "2606:4700::200:5efe:{}",
)


@pytest.mark.parametrize("neighbour", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.1.1", "224.0.0.1", "0.0.0.0", "255.255.255.255", "240.0.0.1"])
def test_nobody_has_this_machine_or_its_wire_dialled_in_whatever_wrapping(host, neighbour):
    """Loopback, link-local, multicast, unspecified and reserved, plain and inside of IPv6, also for a neighbour."""
    number = int(ipaddress.IPv4Address(host))
    packed = f"{number >> 16:x}:{number & 0xFFFF:x}"
    six = [*(wrapping.format(packed) for wrapping in WRAPPINGS), f"2002:{packed}::1"]
    six += [f"2001:0:808:808:0:0:{number >> 16 ^ 0xFFFF:x}:{number & 0xFFFF ^ 0xFFFF:x}"]
    hosts = [f"/ip4/{host}/tcp/22", *(f"/ip6/{one}/tcp/22" for one in six)]
    assert dialable(binary(*hosts), neighbour=neighbour) == ()


def test_home_networks_hide_in_no_wrapping():
    """10.0.0.1 as mapped, translated, NAT64, 6to4 and Teredo; documentation, site-local and benchmark networks."""
    hidden = [wrapping.format("a00:1") for wrapping in WRAPPINGS]
    hidden += ["2002:a00:1::1", "2001:0:808:808::f5ff:fffe", "fec0::1", "fe80::1", "::1", "fc00::1", "ff02::1", "::"]
    plain = ["10.0.0.1", "100.64.0.1", "172.16.0.1", "192.168.0.1", "198.18.0.1", "192.0.2.1", "192.0.0.1"]
    assert dialable(binary(*(f"/ip6/{one}/tcp/22" for one in hidden), *(f"/ip4/{one}/tcp/22" for one in plain))) == ()
    tunnelled = "/ip6/2002:a00:1::1/tcp/22"
    assert dialable(binary(tunnelled), neighbour=True) == ()
    mapped = "/ip6/::ffff:10.0.0.1/tcp/22"
    assert dialable(binary(mapped), neighbour=True) == (str(Multiaddr(binary(mapped)[0])),)
    outside = ["/ip6/2606:4700::1111/tcp/22", "/ip6/::ffff:8.8.8.8/tcp/22", "/ip6/2002:808:808::1/tcp/22"]
    assert len(dialable(binary(*outside))) == 3


SPECIAL = [
    *("192.0.0.1", "192.0.0.8", "192.0.0.9", "192.0.0.10", "192.0.0.255", "192.88.99.1", "192.31.196.1"),
    *("192.52.193.1", "192.175.48.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"),
    *("3fff::1", "3fff:fff::1", "2620:4f:8000::1", "2001:db8::1", "2001:20::1", "2001:2::1", "5f00::1", "100::1"),
]


@pytest.mark.parametrize("neighbour", [False, True])
@pytest.mark.parametrize("host", SPECIAL)
def test_special_purpose_networks_are_dialled_for_nobody(host, neighbour):
    """Also those that some Python versions call global; an IPv4 one in 6to4 neither."""
    hosts = [f"/ip6/{host}/tcp/80" if ":" in host else f"/ip4/{host}/tcp/80"]
    if ":" not in host:
        number = int(ipaddress.IPv4Address(host))
        hosts.append(f"/ip6/2002:{number >> 16:x}:{number & 0xFFFF:x}::1/tcp/80")
    assert dialable(binary(*hosts), neighbour=neighbour) == ()


def test_the_neighbours_of_special_networks_are_dialled():
    """Next to their first and last address, and not port 0 of anybody."""
    near = ["192.0.1.0", "191.255.255.255", "192.31.195.255", "192.88.98.255", "192.88.100.0", "192.175.49.0"]
    hosts = [f"/ip4/{one}/tcp/80" for one in near[:DIALLED_MAX]]
    assert dialable(binary(*hosts)) == tuple(hosts)
    assert dialable(binary("/ip4/8.8.8.8/tcp/0", "/ip6/2606:4700::1111/tcp/0"), neighbour=True) == ()


async def test_naming_our_own_address_makes_nobody_a_neighbour():
    """Who is a neighbour is said by the relay that saw both of us, not by the peer."""
    home, ours = "/ip4/192.168.1.1/tcp/80", "/ip4/8.8.8.8/tcp/4001"
    named = HolePunch(PunchType.CONNECT, tuple(binary(ours, home)))
    seen = {"told": ("/ip6/::ffff:8.8.8.8/tcp/7",), "elsewhere": ("/ip4/8.8.4.4/tcp/7",), "rubbish": ("x",)}
    async with place(ALICE) as alice:
        made = HolePuncher(
            alice.host, candidates=lambda: (ours,), clock=trio.current_time, seen_at=lambda peer: seen.get(peer, ())
        )
        assert made._dialable("told", named) == (ours, home)
        for peer in ("elsewhere", "rubbish", "a stranger"):
            assert made._dialable(peer, named) == (ours,)


async def test_the_believed_relay_says_who_is_a_neighbour():
    """Both ends of a circuit are told that they are seen at one address; of another relay it is not believed."""
    async with relayed() as (relay, alice, bob):
        for one in (alice, bob):
            one.client._believed = RELAY.peer_id
        await bob.client.reserve(relay.address)
        await alice.transport.open(bob.through, "hello")
        for one, other in ((alice, BOB), (bob, ALICE)):
            assert [address.startswith("/ip4/127.0.0.1/tcp/") for address in one.client.seen_at(other.peer_id)] == [
                True
            ]
            assert one.client.seen_at(CAROL.peer_id) == ()
        alice.client._note_seen(CAROL.peer_id, BOB.peer_id, tuple(binary("/ip4/127.0.0.1/tcp/1")))
        assert alice.client.seen_at(BOB.peer_id) == ()


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_list_of_a_peers_addresses_raises(raw):
    """Any bytes are dialled or left out."""
    assert len(dialable(raw)) <= DIALLED_MAX


def puncher(place, candidates=()):
    made = HolePuncher(
        place.host,
        candidates=lambda: candidates or place.transport.addresses,
        clock=trio.current_time,
        open_networks=["127.0.0.0/8"],  # this world is one machine
    )
    made.serve()
    return made


async def test_hole_punching_makes_a_direct_connection_and_both_say_so():
    """Where nothing is in the way the first try does it, or the second if Bob's dial was there first."""
    async with relayed() as (relay, alice, bob):
        await bob.client.reserve(relay.address)
        at_alice, at_bob = puncher(alice), puncher(bob)
        await alice.transport.open(bob.through, "hello")
        outcome = await at_bob.punch(ALICE.peer_id)
        assert (outcome.result, outcome.tries in (1, 2)) == ("direct", True)
        while not (at_alice.view() and at_alice.view()[0].result == "direct"):
            await trio.lowlevel.checkpoint()
        assert alice.host.direct_link(BOB.peer_id)
        assert alice.host.link_of(await alice.transport.open(bob.through, "hello")).via != "relay"
        assert (await at_bob.punch(ALICE.peer_id)).reason == "connected directly already"


async def test_hole_punching_that_fails_says_what_was_tried(monkeypatch):
    """Attempted, failed, and why, on both sides; a further attempt at once is refused."""
    monkeypatch.setattr("echo2.p2p.hole_punch.TRY_SECONDS", 0.3)
    async with relayed() as (relay, alice, bob):
        await bob.client.reserve(relay.address)
        async with place(CAROL) as carol:  # someone else is where each says it is
            at_alice, at_bob = puncher(alice, carol.transport.addresses), puncher(bob, carol.transport.addresses)
            monkeypatch.setattr(Libp2pHost, "addresses", property(lambda self: carol.transport.addresses))
            await alice.transport.open(bob.through, "hello")
            outcome = await at_bob.punch(ALICE.peer_id)
        assert (outcome.result, outcome.tries, outcome.theirs) == ("failed", 3, carol.transport.addresses)
        assert carol.transport.addresses[0] in outcome.reason
        assert at_bob.view() == (outcome,)
        assert (await at_bob.punch(ALICE.peer_id)).result == "not_tried"
        while not (at_alice.view() and at_alice.view()[0].tries == 3):
            await trio.lowlevel.checkpoint()
        assert at_alice.view()[0].result == "failed"
        assert at_bob.view() == (outcome,)


async def test_who_listens_nowhere_says_that_it_did_not_try():
    """Without a port to dial from there is nothing to punch with."""
    async with relayed(alice_listens=()) as (_relay, alice, _bob):
        outcome = await puncher(alice).punch(BOB.peer_id)
        assert (outcome.result, outcome.reason) == ("not_tried", "this process listens on no port to dial from")


async def test_a_port_that_is_shared_for_dialling_is_still_refused_to_others():
    """A second process that would listen there gets its error."""
    async with place(ALICE) as alice:
        puncher(alice)
        with pytest.raises(ConfigurationError, match="another process uses this port"):
            async with place(BOB, alice.transport.addresses):
                pass
