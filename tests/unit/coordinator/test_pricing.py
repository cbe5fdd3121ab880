"""Money in whole numbers: worked by hand, and properties that hold for any history."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.coordinator import pricing
from echo2.coordinator.money import micro_dollars
from echo2.coordinator.pricing import Budget, CreditRates, Credits, book, open_account

HOUR = 3_600_000
PRICES = st.integers(0, 100_000_000)
RATES = st.floats(0.001, 1000)


def test_rho_by_hand():
    """$0.36 an hour at 2 rollouts a second: 0.36 / 3600 / 2 dollars = 50 micro-dollars = 50,000,000 pico-dollars."""
    assert pricing.rho_pico(360_000, 2.0) == 50_000_000
    assert pricing.rho_pico(0, 2.0) == 0
    with pytest.raises(ValueError, match="no price per rollout"):
        pricing.rho_pico(1, 0.0)


def test_an_hour_at_the_measured_rate_pays_what_was_asked():
    """7200 rollouts at 50 micro-dollars are $0.36, which is also the cap of an hour."""
    account = pricing.lease(open_account("a", "r", price=360_000, mu=2.0), 7200)
    account, entry = book(account, rollouts=7200, milliseconds=HOUR)
    assert entry is not None
    assert (entry.kind, entry.unit, entry.amount_micros, entry.reason) == ("credit", "usd", 360_000, "pay")
    assert account.entered == account.due == 360_000


def test_a_faster_node_is_not_paid_more_an_hour_than_it_asked():
    """10,000 rollouts in an hour would be $0.50; it asked for $0.36. In the next hour the rest becomes due."""
    account = pricing.lease(open_account("a", "r", price=360_000, mu=2.0), 10_000)
    account, entry = book(account, rollouts=10_000, milliseconds=HOUR)
    assert entry is not None
    assert (entry.amount_micros, entry.reason) == (360_000, "pay, capped at $0.36 an hour")
    account, entry = book(account, milliseconds=HOUR)
    assert entry is not None
    assert entry.amount_micros == 140_000


def test_a_slower_node_is_paid_for_what_it_made():
    """3600 rollouts at 50 micro-dollars are $0.18, though the hour was worth $0.36."""
    account = pricing.lease(open_account("a", "r", price=360_000, mu=2.0), 3600)
    _, entry = book(account, rollouts=3600, milliseconds=HOUR)
    assert entry is not None
    assert entry.amount_micros == 180_000


def test_a_volunteer_is_paid_nothing_and_owes_nothing():
    """Price 0: no entries, no reservation, never refused by a budget."""
    account = pricing.lease(open_account("a", "r", price=0, mu=2.0), 100)
    account, entry = book(account, rollouts=100, milliseconds=HOUR)
    assert entry is None
    assert account.liability == 0
    assert Budget(0).refusal([account], pricing.lease(account, 1000).liability) == ""
    assert Budget(0).samples_max([account], account) is None


@pytest.mark.parametrize(
    ("state", "in_time", "suspended", "paid"),
    [
        ("consumed", True, False, True),
        ("consumed", False, False, True),
        ("evaluated", True, False, True),
        ("stale", True, False, True),
        ("stale", False, False, False),
        ("withdrawn", True, False, True),
        ("withdrawn", True, True, False),
        ("rejected", True, False, False),
        ("duplicate", True, False, False),
    ],
)
def test_what_is_payable(state, in_time, suspended, paid):
    """The table, line by line."""
    assert pricing.payable(state, in_time=in_time, suspended=suspended) is paid


def test_credits_by_hand():
    """Two consumed at 1, two stale at a half; 1.5 GiB relayed at 1 a GiB; none for a slice that came too late."""
    rates, mine = CreditRates(), Credits("a", "r")
    earned = [
        pricing.credit_rollouts(mine, rates, state="consumed", count=2, in_time=True),
        pricing.credit_rollouts(mine, rates, state="stale", count=2, in_time=True),
        pricing.credit_rollouts(mine, rates, state="stale", count=2, in_time=False),
        pricing.credit_rollouts(mine, rates, state="rejected", count=2, in_time=True),
    ]
    assert [None if entry is None else (entry.reason, entry.amount_micros) for entry in earned] == [
        ("consumed", 2_000_000),
        ("stale", 1_000_000),
        None,
        None,
    ]
    mine, first = pricing.credit_relayed(mine, rates, 1 << 30)
    mine, second = pricing.credit_relayed(mine, rates, 1 << 29)
    assert first is not None
    assert second is not None
    assert (first.amount_micros, second.amount_micros) == (1_000_000, 500_000)


def test_amounts_as_people_write_them():
    """Dollars to the micro-dollar, without the binary fractions of floats; nonsense is refused in words."""
    assert micro_dollars("0.35") == micro_dollars(0.35) == 350_000
    assert micro_dollars(2) == 2_000_000
    assert micro_dollars("0.0000005") == 0  # half to even
    for wrong in ("-1", "nan", "inf", "two", "1e12"):
        with pytest.raises(ValueError, match="dollars"):
            micro_dollars(wrong)


def test_a_run_stops_leasing_before_its_budget():
    """$0.001 at 50 micro-dollars a rollout: 20 samples may be out; of those that fail, as many may be leased again."""
    budget = Budget(1000)
    account = open_account("a", "r", price=360_000, mu=2.0)
    assert budget.samples_max([account], account) == 20
    account = pricing.lease(account, 20)
    assert budget.refusal([account], 50).startswith("the run's budget of $0.001 is reached: $0 spent")
    account, _ = book(account, rollouts=15, milliseconds=HOUR, unpaid=5)
    assert budget.samples_max([account], account) == 5
    assert budget.refusal([account], 250) == ""
    assert "$0.00075 spent" in budget.refusal([account], 300)


def test_a_closed_account_gives_back_what_it_will_not_need():
    """Capped arrears of a node that was released never become due."""
    account = pricing.lease(open_account("a", "r", price=360_000, mu=2.0), 100)
    account, entry = book(account, rollouts=100, milliseconds=36_000)  # earned 5000, cap 3600
    assert entry is not None
    assert (entry.amount_micros, account.liability) == (3600, 5000)
    assert pricing.close(account).liability == 3600
    with pytest.raises(ValueError, match="were out"):
        book(pricing.close(account), milliseconds=HOUR)


def test_a_node_that_was_never_measured_gets_its_rho_when_it_is():
    """What it made before counts at it; so long its price for the time of its leases is set aside."""
    account = open_account("a", "r", price=360_000, mu=None)
    assert account.liability == 0
    account = pricing.lease(account, 8, 60_000)
    assert account.liability == 6_000
    account, entry = book(account, rollouts=6, milliseconds=30_000, unpaid=2)
    assert (entry, account.liability) == (None, 6_000)
    fixed = pricing.measured(account, 0.2)  # 500 micro-dollars each
    assert (fixed.earned, fixed.cap) == (3_000, 3_000)
    assert pricing.measured(account, 0.01, room=1_200).earned == 1_200
    with pytest.raises(ValueError, match="fixed for the whole activation"):
        pricing.measured(fixed, 1.0)


def test_what_was_never_out_is_not_paid():
    """A defect of ours that would pay twice is an error, not an entry."""
    with pytest.raises(ValueError, match="1 samples are decided, 0 were out"):
        book(open_account("a", "r", price=360_000, mu=2.0), rollouts=1)
    with pytest.raises(ValueError, match="never taken back"):
        book(open_account("a", "r", price=360_000, mu=2.0), milliseconds=-1)


@given(
    price=PRICES,
    mu=RATES,
    bookings=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50), st.integers(0, 100_000)), max_size=30),
)
def test_entries_add_up_to_what_is_due(price, mu, bookings):
    """For any history: no entry is negative, their sum is min(n rho, c t) rounded down once, never above the cap."""
    account, total = open_account("a", "r", price=price, mu=mu), 0
    for payable, unpaid, milliseconds in bookings:
        account = pricing.lease(account, payable + unpaid)
        before = account.liability
        account, entry = book(account, rollouts=payable, milliseconds=milliseconds, unpaid=unpaid)
        assert account.liability <= before
        if entry is not None:
            assert entry.amount_micros > 0
            total += entry.amount_micros
        assert total == account.entered == account.due
        exact = min(
            Fraction(account.rollouts * account.rho, 10**6), Fraction(account.price * account.milliseconds, HOUR)
        )
        assert exact - 1 < total <= exact
        assert total <= account.liability
    if price:
        assert abs(account.rho - Fraction(price * 10**6, 3600) / Fraction(mu)) <= Fraction(1, 2) + Fraction(1, 1000)


@given(parts=st.lists(st.integers(0, 5000), min_size=1, max_size=20), price=PRICES, mu=RATES, hours=st.integers(0, 10))
def test_how_it_is_cut_into_bookings_does_not_matter(parts, price, mu, hours):
    """One booking of everything and one for each part give the same balance."""
    whole = replace(open_account("a", "r", price=price, mu=mu), outstanding=sum(parts))
    once, _ = book(whole, rollouts=sum(parts), milliseconds=hours * HOUR)
    for part in parts:
        whole, _ = book(whole, rollouts=part)
    whole, _ = book(whole, milliseconds=hours * HOUR)
    assert whole == once


@given(
    limit=st.integers(0, 10**6),
    nodes=st.lists(st.tuples(PRICES, RATES), min_size=1, max_size=4),
    events=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100), st.integers(0, 100), st.booleans()), max_size=40),
)
def test_a_budget_is_never_exceeded(limit, nodes, events):
    """Whatever is leased, delivered, refused or released: leases are granted only as the budget says, and it holds."""
    budget = Budget(limit)
    accounts = [open_account(str(index), "r", price=price, mu=mu) for index, (price, mu) in enumerate(nodes)]
    for index, samples, payable, deliver in events:
        index %= len(accounts)
        account = accounts[index]
        if deliver:
            paid = min(payable, account.outstanding)
            accounts[index], _ = book(account, rollouts=paid, milliseconds=10_000, unpaid=account.outstanding - paid)
        else:
            after = pricing.lease(account, samples)
            most = budget.samples_max(accounts, account)
            refused = budget.refusal(accounts, after.liability - account.liability)
            assert bool(refused) == (most is not None and samples > most)
            accounts[index] = account if refused else after
        assert sum(each.entered for each in accounts) <= sum(each.liability for each in accounts) <= limit


@given(lengths=st.lists(st.integers(0, 1 << 32), max_size=30), rate=st.integers(0, 10**7))
def test_relayed_bytes_are_credited_exactly(lengths, rate):
    """The sum of the entries is that of the total, rounded down once."""
    mine, rates, total = Credits("a", "r"), CreditRates(relayed_gib=rate), 0
    for length in lengths:
        mine, entry = pricing.credit_relayed(mine, rates, length)
        total += 0 if entry is None else entry.amount_micros
    assert total == sum(lengths) * rate >> 30
