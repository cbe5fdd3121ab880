"""Hole punching where nothing is in the way, where something is, and what is said of it."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr
from unit.p2p.relay_places import ALICE, BOB, CAROL, place, relayed

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.hole_punch import DIALLED_MAX, HolePuncher, dialable
from echo2.p2p.relay_host import Libp2pHost


def test_only_numbers_that_are_somebodys_are_dialled_for_a_peer():
    """Names, datagrams, multicast, rubbish and other homes' networks are left out, and the list is cut."""
    home = "/ip4/192.168.1.1/tcp/80"
    assert dialable([Multiaddr(home).to_bytes()], {"198.51.100.1"}) == ()
    good = [f"/ip4/192.0.2.1/tcp/{port}" for port in range(1, 20)]
    assert dialable([Multiaddr(one).to_bytes() for one in (home, good[0])], {"192.0.2.1"}) == (home, good[0])
    bad = ["/dns/example.org/tcp/1", "/ip4/224.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1", "/ip4/192.0.2.1/udp/1"]
    raw = [b"", b"\xff\xff", b"\x04\x01", *(Multiaddr(one).to_bytes() for one in bad + good)]
    assert dialable(raw) == tuple(good[:DIALLED_MAX])


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_list_of_a_peers_addresses_raises(raw):
    """Any bytes are dialled or left out."""
    assert len(dialable(raw)) <= DIALLED_MAX


def puncher(place, candidates=()):
    made = HolePuncher(place.host, candidates=lambda: candidates or place.transport.addresses, clock=trio.current_time)
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
