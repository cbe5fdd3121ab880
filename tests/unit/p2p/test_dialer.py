"""The race of a peer's addresses, by hand and under a virtual clock."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.dialer import (
    ENDPOINTS_MAX,
    REASON_CHARACTERS_MAX,
    RESOLVE_SECONDS,
    STAGGER_SECONDS,
    UNFINISHED,
    Attempt,
    DialReport,
    Endpoint,
    Race,
    dial,
    resolve_name,
    with_way,
)

V4 = "/ip4/192.0.2.1/tcp/4001"
OTHER_V4 = "/ip4/192.0.2.2/tcp/4001"
V6 = "/ip6/2001:db8::1/tcp/4001"
NAME = "/dns/node.example/tcp/4001"


class Net:
    """Hosts that connect, refuse or stay silent after some seconds; `started` tells when each was dialled."""

    def __init__(self, **hosts):
        self.hosts = {name.replace("_", "."): outcome for name, outcome in hosts.items()}
        self.started = []
        self.closed = []

    async def connect(self, endpoint):
        self.started.append((round(trio.current_time(), 3), str(endpoint)))
        seconds, outcome = self.hosts[endpoint.host]
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            self.closed.append(endpoint.host)
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def silent():
    return float("inf"), None


async def tried(addresses, net, **more):
    found, attempts = await dial(addresses, net.connect, seconds_max=10, **more)
    return found, {attempt.address: attempt.outcome for attempt in attempts}


def test_families_take_turns_ipv6_first():
    """The order is IPv6, IPv4, IPv6 ..., each as the peer gave them."""
    race = Race([V4, OTHER_V4, V6], 0.0)
    order = []
    for n in range(3):
        order.append(race.next(n * STAGGER_SECONDS).address)
    assert order == [V6, V4, OTHER_V4]


def test_next_one_starts_after_its_time_or_a_failure():
    """Nothing starts before the delay, unless the last one failed."""
    race = Race([V4, OTHER_V4, "/ip4/192.0.2.3/tcp/1"], 0.0)
    first = race.next(0.0)
    assert race.next(0.1) is None
    assert race.seconds_until_next(0.1) == pytest.approx(STAGGER_SECONDS - 0.1)
    race.ended(first, "refused", 0.15)
    assert race.next(0.15).address == OTHER_V4
    assert race.next(0.15 + STAGGER_SECONDS) is not None
    assert race.seconds_until_next(9.0) is None
    assert not race.over


@given(st.lists(st.text(max_size=30) | st.sampled_from([V4, V6, NAME, V4 + "/p2p-circuit"]), max_size=20))
def test_any_addresses_make_a_race_that_ends(addresses):
    """Whatever a peer announces: each address is looked up, tried, left to relays or refused, and then it is over."""
    race, now = Race(addresses, 0.0), 0.0
    for name in list(race.names):
        race.unresolved(name, "no such name", now)
    while not race.over:
        endpoint = race.next(now)
        if endpoint is None:
            now += race.seconds_until_next(now)
        else:
            race.ended(endpoint, "refused", now)
    told = {attempt.address for attempt in race.attempts}
    assert told == {address for address in addresses if "/p2p-circuit" not in address}


def test_name_with_many_addresses_is_bounded():
    """A name may resolve to anything; a fixed number of places is tried, and none twice."""
    race = Race([NAME, V4], 0.0)
    race.resolved(NAME, [f"198.51.100.{n % 200}" for n in range(1000)])
    started = 0
    while race.next(started * STAGGER_SECONDS) is not None:
        started += 1
    assert started == ENDPOINTS_MAX


async def test_good_address_wins_at_once(autojump_clock):
    """One good address: connected, nothing else tried."""
    net = Net(**{"192_0_2_1": (0.05, "yes")})
    assert await tried([V4, OTHER_V4], net) == ("yes", {V4: ""})
    assert trio.current_time() == pytest.approx(0.05)


async def test_silent_addresses_cost_one_delay_each_and_are_dropped(autojump_clock):
    """Behind two silent addresses the good one is reached after two delays, and they are closed and named."""
    net = Net(**{"2001:db8::1": silent(), "192_0_2_1": silent(), "192_0_2_2": (0.1, "yes")})
    found, outcomes = await tried([V6, V4, OTHER_V4], net)
    assert found == "yes"
    assert trio.current_time() == pytest.approx(2 * STAGGER_SECONDS + 0.1)
    assert outcomes == {OTHER_V4: "", V6: UNFINISHED, V4: UNFINISHED}
    assert sorted(net.closed) == ["192.0.2.1", "2001:db8::1"]


async def test_refusals_cost_nothing(autojump_clock):
    """A refused address lets the next one go at once."""
    net = Net(**{"2001:db8::1": (0.01, OSError(111, "Connection refused")), "192_0_2_1": (0.02, "yes")})
    await tried([V6, V4], net)
    assert trio.current_time() == pytest.approx(0.03)


async def test_slow_first_address_may_still_win(autojump_clock):
    """An address that answers late is not given up because another has begun."""
    net = Net(**{"192_0_2_1": (1.0, "slow"), "192_0_2_2": silent()})
    found, _ = await tried([V4, OTHER_V4], net)
    assert (found, round(trio.current_time(), 3)) == ("slow", 1.0)


async def test_all_fail_and_each_says_why(autojump_clock):
    """When nothing connects, every address and its reason is told, within the bound."""
    net = Net(**{"2001:db8::1": silent(), "192_0_2_1": (0.1, ValueError("x" * 9999))})

    async def resolve(kind, host):
        raise OSError(-2, "Name or service not known")

    found, outcomes = await tried([V6, V4, "nonsense", NAME], net, resolve=resolve)
    assert found is None
    assert trio.current_time() <= 10 + STAGGER_SECONDS
    assert outcomes[V6] == "no answer within 10 s"
    assert outcomes[V4] == "x" * REASON_CHARACTERS_MAX
    assert "not an address" in outcomes["nonsense"]
    assert "not known" in outcomes[NAME]


async def test_names_are_looked_up_beside(autojump_clock):
    """A name that resolves late does not hold up an address, and joins when it is known."""
    asked = []

    async def resolve(kind, host):
        asked.append((kind, host))
        await trio.sleep(1.0)
        return ["198.51.100.1", "2001:db8::9"]

    net = Net(**{"192_0_2_1": (0.5, OSError("refused")), "2001:db8::9": (0.1, "yes")})
    found, attempts = await dial(["/dns6/n.example/tcp/4001", V4], net.connect, seconds_max=10, resolve=resolve)
    assert (found, asked) == ("yes", [("dns6", "n.example")])
    assert trio.current_time() == pytest.approx(1.1)
    assert [str(attempt) for attempt in attempts] == [
        f"{V4} (192.0.2.1:4001): refused",
        "/dns6/n.example/tcp/4001 ([2001:db8::9]:4001): connected",
    ]


@pytest.mark.parametrize(("answer", "reason"), [("hang", f"within {RESOLVE_SECONDS:g} s"), ("none", "no address")])
async def test_name_that_leads_nowhere(autojump_clock, answer, reason):
    """A name server that hangs, or answers with nothing, is told in time."""

    async def resolve(kind, host):
        if answer == "hang":
            await trio.sleep_forever()
        return []

    found, outcomes = await tried([NAME], Net(), resolve=resolve)
    assert found is None
    assert reason in outcomes[NAME]


async def test_two_winners_of_one_instant(autojump_clock):
    """When two connect in the same instant one is returned and nothing breaks."""
    net = Net(**{"2001:db8::1": (STAGGER_SECONDS + 0.1, "one"), "192_0_2_1": (0.1, "two")})
    found, _ = await tried([V6, V4], net)
    assert found in {"one", "two"}


async def test_nothing_to_dial():
    """No address, or only one through a relay: nothing is tried."""
    assert await tried([], Net()) == (None, {})
    assert await tried([V4 + "/p2p/12D3KooW/p2p-circuit"], Net()) == (None, {})


async def test_cancelled_dial_closes_what_it_began(autojump_clock):
    """Whoever gives up the dial leaves no connection behind."""
    net = Net(**{"192_0_2_1": silent()})
    with trio.move_on_after(1):
        await tried([V4], net)
    assert net.closed == ["192.0.2.1"]


async def test_names_of_this_machine():
    """`localhost` is found, of the family that was asked for; a name that cannot be is an OSError."""
    assert await resolve_name("dns4", "localhost") == ["127.0.0.1"]
    with pytest.raises(OSError):
        await resolve_name("dns", "no-such-name.invalid")


def test_report_in_words():
    """What was tried is one line, with the ways that are no addresses."""
    attempts = with_way([Attempt(V4, "192.0.2.1:4001", 0, 0.5, "refused")], "relay", 3.0, 4.0, "no relay\nknown")
    assert attempts[1].started_seconds == 0.5
    assert (
        str(DialReport("p", 0.0, 1.5, tuple(attempts), "")) == f"{V4} (192.0.2.1:4001): refused; relay: no relay known"
    )
    assert str(DialReport("p", 0.0, 1.5, (), "")) == "it has no address to dial"
    assert str(Endpoint(V6, "2001:db8::1", 1)) == "[2001:db8::1]:1"
