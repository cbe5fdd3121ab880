"""Caps, bans and back-off, by hand and under arbitrary histories."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p import guards, peer_file
from echo2.p2p.guards import (
    BACK_OFF_SECONDS,
    BACK_OFF_SECONDS_MAX,
    BAN_SECONDS,
    BAN_SECONDS_MAX,
    FREE_FAILURES,
    NUISANCE_BURST,
    NUISANCE_PER_SECOND,
    OFFENCE_SECONDS,
    OFFENCES_MAX,
    Admission,
    BackOff,
    Bans,
    Buffers,
    Nuisance,
    TransportLimits,
    group_of,
)

WHERE = ("/ip4/192.0.2.1/tcp/4001",)
NOW = 1_800_000_000.0


def back_off():
    return BackOff(lambda: 0.0)


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("192.0.2.7", ("192.0.2.7/32", "192.0.2.0/24")),
        ("::ffff:192.0.2.7", ("192.0.2.7/32", "192.0.2.0/24")),
        ("2001:db8:1:2:3::4", ("2001:db8:1:2::/64", "2001:db8:1::/48")),
        ("fe80::1%eth0", ("fe80::/64", "fe80::/48")),
        ("127.0.0.9", None),
        ("::1", None),
        ("", None),
    ],
)
def test_where_a_connection_counts(host, group):
    """An IPv4 address and its /24; of IPv6 the /64 and the /48; this machine nowhere."""
    assert group_of(host) == group


def test_caps_by_address_network_and_total():
    """Each cap refuses what is beyond it, and a place that was left can be taken again."""
    limits = TransportLimits(per_address_max=2, per_network_max=3, inbound_max=5, arrivals_per_second=1000)
    admission = Admission(limits)
    assert [admission.enter("192.0.2.1", n) for n in range(2)] == [None, None]
    assert "2 connections from 192.0.2.1/32" in admission.enter("192.0.2.1", 2)
    assert admission.enter("192.0.2.2", 3) is None
    assert "3 connections from 192.0.2.0/24" in admission.enter("192.0.2.3", 4)
    assert [admission.enter("127.0.0.1", 5) for _ in range(2)] == [None, None]
    assert "5 inbound connections" in admission.enter("198.51.100.1", 6)
    admission.leave("192.0.2.1")
    assert admission.enter("192.0.2.9", 7) is None


def test_loopback_counts_when_it_is_not_exempt():
    """Behind a proxy of one's own machine the exemption can be taken away."""
    admission = Admission(TransportLimits(per_address_max=1, loopback_exempt=False))
    assert admission.enter("127.0.0.1", 0) is None
    assert "this machine" in admission.enter("::1", 0)


def test_one_address_that_connects_too_often_waits():
    """After the burst an address gets its rate of connections, however quickly it closes them."""
    admission = Admission(TransportLimits(per_address_max=3, arrivals_per_second=1))

    def visit(now):
        refused = admission.enter("192.0.2.1", now)
        if refused is None:
            admission.leave("192.0.2.1")
        return refused

    assert [visit(0.0) for _ in range(3)] == [None] * 3
    assert "too often" in visit(0.5)
    assert visit(1.1) is None
    assert "too often" in visit(1.2)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=200))
def test_admission_counts_to_zero(moves):
    """Whatever comes and goes, after all have left nothing is counted."""
    admission = Admission(TransportLimits(per_address_max=3, per_network_max=5, inbound_max=8))
    inside = []
    for now, (enters, n) in enumerate(moves):
        if enters:
            if admission.enter(f"192.0.{n % 2}.{n}", float(now)) is None:
                inside.append(f"192.0.{n % 2}.{n}")
        elif inside:
            admission.leave(inside.pop())
        assert admission.total == len(inside) <= 8
        assert all(count <= 5 for count in admission.places.values())
    for host in inside:
        admission.leave(host)
    assert (admission.total, admission.places) == (0, {})


def test_who_holds_too_much_ends():
    """One beyond its own cap ends itself; beyond the common cap the one with most ends, whoever came last."""
    buffers = Buffers(each_max=100, total_max=150)
    assert buffers.take("a", 90) is None
    assert buffers.take("b", 60) is None
    assert buffers.take("c", 1) == "a"
    buffers.drop("a")
    assert buffers.total == 61
    assert buffers.take("b", 50) == "b"
    buffers.give("b", 500)
    assert (buffers.held("b"), buffers.total) == (0, 1)
    buffers.give("gone", 5)
    assert buffers.total == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "give", "drop"]), st.integers(0, 50))))
def test_buffers_add_up(moves):
    """The total is always the sum of what each holds, and none holds less than nothing."""
    buffers = Buffers(each_max=100, total_max=200)
    for key, move, count in moves:
        if move == "drop":
            buffers.drop(key)
        else:
            getattr(buffers, move)(key, count)
        held = [buffers.held(each) for each in "abc"]
        assert min(held) >= 0
        assert buffers.total == sum(held)


def test_nuisance_is_borne_to_its_bound():
    """A burst and a rate are borne; more is too much."""
    nuisance = Nuisance(0.0)
    assert not any(nuisance.one_more(0.0) for _ in range(NUISANCE_BURST))
    assert nuisance.one_more(0.0)
    assert not any(nuisance.one_more(1.0) for _ in range(int(NUISANCE_PER_SECOND)))
    assert nuisance.one_more(1.0)


def test_several_offences_make_a_ban_that_ends():
    """The last of several offences within the time bans; the ban says why and is over after its time."""
    bans = Bans()
    assert [bans.offence("p", "bad frame", NOW + n) for n in range(OFFENCES_MAX - 1)] == [None] * (OFFENCES_MAX - 1)
    ban = bans.offence("p", "worse", NOW + 10)
    assert "worse" in ban.reason
    assert bans.find("p", NOW + 11) == ban
    assert bans.find("q", NOW + 11) is None
    assert bans.find("p", NOW + 10 + BAN_SECONDS) is None


def test_offences_far_apart_make_none():
    """Errors spread over hours are those of an honest peer."""
    bans = Bans()
    assert not any(bans.offence("p", "x", NOW + n * OFFENCE_SECONDS) for n in range(50))


def test_offences_while_banned_are_not_counted():
    """What a peer sent before its ban is read after it: one burst must not cost the longest ban there is."""
    bans = Bans()
    for n in range(10 * OFFENCES_MAX):
        bans.offence("p", "x", NOW + n / 100)
    assert bans.find("p", NOW + 1).times == 1
    assert bans.find("p", NOW + BAN_SECONDS + 1) is None


def test_each_ban_is_longer_up_to_a_day():
    """A peer that comes back as it was is refused for twice as long; never for more than the bound."""
    bans, now, lengths = Bans(), NOW, []
    for _ in range(12):
        ban = bans.ban("p", "again", now)
        lengths.append(ban.until - now)
        now = ban.until + 1
    assert lengths[:3] == [BAN_SECONDS, 2 * BAN_SECONDS, 4 * BAN_SECONDS]
    assert lengths[-1] == BAN_SECONDS_MAX
    bans.lift("p")
    assert bans.ban("p", "again", now).until == now + BAN_SECONDS


def test_ban_under_a_wrong_clock_is_over():
    """A ban that ends further off than any can be does not shut a peer out for years."""
    bans = Bans()
    bans.ban("p", "x", NOW + 10 * BAN_SECONDS_MAX)
    assert bans.find("p", NOW) is None


def test_records_are_bounded(monkeypatch):
    """Any number of peers costs a fixed number of records."""
    monkeypatch.setattr(guards, "RECORDS_MAX", 10)
    bans, waits = Bans(), back_off()
    for n in range(100):
        bans.ban(f"b{n}", "x", NOW + n)
        bans.offence(f"o{n}", "x", NOW)
        waits.failed(f"f{n}", WHERE, NOW)
    assert [ban.peer for ban in bans.current(NOW + 100)] == [f"b{n}" for n in range(90, 100)]
    assert len(bans._offences) == len(waits.remembered(NOW)) == 10


def test_back_off_by_hand():
    """The first failures cost nothing, then the wait doubles to its bound, and success forgets."""
    waits, now, seen = back_off(), NOW, []
    for _ in range(14):
        waits.failed("p", WHERE, now)
        seen.append(waits.wait("p", WHERE, now))
        now += seen[-1]
    assert seen[:FREE_FAILURES] == [0.0] * FREE_FAILURES
    assert seen[FREE_FAILURES : FREE_FAILURES + 3] == pytest.approx([BACK_OFF_SECONDS * 2**n for n in range(3)])
    assert seen[-1] == pytest.approx(BACK_OFF_SECONDS_MAX)
    assert waits.succeeded("p")
    assert not waits.succeeded("p")
    assert waits.wait("p", WHERE, now) == 0


def test_new_addresses_are_tried_at_once():
    """A peer that came back under another address is not kept waiting for the failures of the old one."""
    waits = back_off()
    for _ in range(10):
        waits.failed("p", WHERE, NOW)
    assert waits.wait("p", WHERE, NOW) > 0
    assert waits.wait("p", ("/ip4/192.0.2.2/tcp/1",), NOW) == 0
    assert waits.failed("p", ("/ip4/192.0.2.2/tcp/1",), NOW).failures == 1


def test_waits_are_spread():
    """The same failures at two processes end at different times, and never later than the bound."""
    early, late = BackOff(lambda: 0.99), BackOff(lambda: 0.0)
    for waits in (early, late):
        for _ in range(20):
            waits.failed("p", WHERE, NOW)
    assert BACK_OFF_SECONDS_MAX / 2 <= early.wait("p", WHERE, NOW) < late.wait("p", WHERE, NOW) <= BACK_OFF_SECONDS_MAX


def test_clock_set_back_keeps_no_one_waiting():
    """A failure in the future says nothing."""
    waits = back_off()
    for _ in range(10):
        waits.failed("p", WHERE, NOW)
    assert waits.wait("p", WHERE, NOW - 1000) == 0


def test_restart_forgets_neither_bans_nor_back_off(tmp_path):
    """What is written is read again, and counts on from there."""
    path = tmp_path / peer_file.PEER_FILE
    bans, waits = Bans(), back_off()
    bans.ban("bad", "sent nonsense \0 ü", NOW)
    for _ in range(6):
        waits.failed("gone", WHERE, NOW)
    assert peer_file.replace_by(path, peer_file.rows(bans, waits, NOW)) is None
    bans_again, waits_again = Bans(), back_off()
    peer_file.recall(path, bans_again, waits_again, NOW + 1)
    assert bans_again.find("bad", NOW + 1) == bans.find("bad", NOW + 1)
    assert waits_again.wait("gone", WHERE, NOW + 1) == waits.wait("gone", WHERE, NOW + 1) > 0
    assert bans_again.ban("bad", "again", NOW + 2).times == 2
    assert [each.name for each in tmp_path.iterdir()] == [peer_file.PEER_FILE]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2}',
        '{"bans": [{"peer": 1}]}',
        '{"format": 1, "bans": [{}]}',
        "\0" * 100,
        "x" * 10_000,
    ],
)
def test_damaged_file_is_an_empty_one(tmp_path, text, caplog):
    """Whatever the file has become, the transport starts without it and says so."""
    path = tmp_path / "peers.json"
    path.write_text(text)
    bans, waits = Bans(), back_off()
    peer_file.recall(path, bans, waits, NOW)
    assert (bans.current(NOW), waits.remembered(NOW)) == ([], [])
    assert "start anew" in caplog.text


def test_disk_that_takes_nothing_is_told(tmp_path):
    """Bans work without their file."""
    assert isinstance(peer_file.write(tmp_path / "missing" / "peers.json", b"{}"), FileNotFoundError)


def test_limits_are_one_record():
    """A limit is changed by making another record."""
    assert replace(TransportLimits(), inbound_max=3).inbound_max == 3


def test_one_network_that_connects_too_often_waits():
    """By hand: a /48 with a burst of 4 and one a second, each time from another /64; another network is let in."""
    limits = TransportLimits(per_network_max=4, network_arrivals_per_second=1)
    admission = Admission(limits)

    def visit(host, now):
        refused = admission.enter(host, now)
        if refused is None:
            admission.leave(host)
        return refused

    assert [visit(f"2001:db8:1:{n}::1", 0.0) for n in range(4)] == [None] * 4
    assert "2001:db8:1::/48 connects too often" in visit("2001:db8:1:9::1", 0.5)
    assert visit("2001:db8:2::1", 0.5) is None
    assert visit("2001:db8:1:10::1", 1.1) is None


def test_room_is_asked_for_last():
    """Who is refused for its address displaces nobody."""
    asked = []
    admission = Admission(TransportLimits(per_address_max=1, inbound_max=1))
    assert admission.enter("192.0.2.1", 0, lambda: not asked.append(1)) is None
    assert "192.0.2.1/32" in admission.enter("192.0.2.1", 1, lambda: not asked.append(2))
    assert admission.enter("192.0.2.2", 2, lambda: not asked.append(3)) is None
    assert "1 inbound connections" in admission.enter("192.0.2.3", 3, lambda: bool(asked.append(4)))
    assert asked == [1, 3, 4]
