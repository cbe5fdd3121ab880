"""Accounts over any history: whatever comes in whichever order, however often everything is read from the ledger."""

from __future__ import annotations

from fractions import Fraction

import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2.coordinator import accounts, history, records, schema
from echo2.coordinator.leases import LeaseBook, LeaseEntry, LeaseRules
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.payroll import GAP_SECONDS_MAX, Payroll, Settlement, load_payroll
from echo2.coordinator.pool import NodeEntry, Pool, Tally
from echo2.coordinator.pricing import Budget, CreditRates, payable
from echo2.coordinator.records import RolloutEntry
from echo2.coordinator.run_book import Changes, RunBook
from echo2.coordinator.slots import Span
from echo2.p2p.identity import Identity

RULES = LeaseRules(group_size=4, rollouts_per_step=8, steps=1000, staleness_max=2, slice_samples=4)
LEASE_SECONDS = 30.0
WALL = 1_700_000_000.0
PEERS = [Identity(bytes([number]) * 32).peer_id for number in (1, 2, 3)]
RATES = CreditRates(consumed=7, stale=3)
LIMIT = 20_000


class Histories(RuleBasedStateMachine):
    """Two paid nodes and a volunteer. The model counts with fractions what the ledger must hold."""

    def __init__(self):
        super().__init__()
        self.ledger = open_ledger("sqlite://")
        self.now = 0.0
        self.leases = {}
        self.counted = {}
        self.credits = 0
        self.number = 0
        self.start()

    def teardown(self):
        with self.ledger.reading() as connection:
            assert history.replay(history.read_bodies(connection)) == history.read_state(connection)
            assert accounts.verify(connection).fault == ""
        self.ledger.close()

    def start(self):
        """A coordinator begins: from nothing but the ledger."""
        pool = Pool(10.0)
        for peer in PEERS:
            pool.nodes[peer] = NodeEntry(peer, "n", "s", (), seen_at=self.now)
        self.run = RunBook("r", LeaseBook(RULES))
        self.pay = Payroll("r", RATES, Budget(LIMIT), pool, self.run.leases)
        with self.ledger.reading() as connection:
            for entry in records.load_unfinished(connection, "r"):
                self.run.unfinished[entry.lease_id, entry.sample] = entry
            last = sa.select(schema.rollouts.c.peer, sa.func.max(schema.rollouts.c.receipt_sequence))
            for peer, sequence in connection.execute(last.group_by(schema.rollouts.c.peer)):
                self.run.receipts[peer] = sequence or 0
            self.run.numbers.rollout_id = (connection.scalar(sa.select(sa.func.max(schema.rollouts.c.id))) or 0) + 1
            load_payroll(connection, self.pay, self.run.unfinished.values(), now=self.now, wall=self.wall)

    @property
    def wall(self):
        return WALL + self.now

    def settlement(self):
        self.pay.expire(self.now)
        return Settlement(self.pay, self.now)

    def changes(self):
        return Changes(self.run, self.pay.pool, Tally(), self.settlement())

    def commit(self, changes):
        with self.ledger.transaction() as connection:
            changes.record(connection, wall=self.wall, actor="a", action="b", kind="flow")
        changes.apply()

    def commit_pay(self, settlement):
        with self.ledger.transaction() as connection:
            rows = settlement.changes(self.wall)
            records.record(connection, rows, wall=self.wall, actor="a", action="b", kind="flow")
            settlement.post(connection, self.wall)
        settlement.apply()

    @rule(seconds=st.sampled_from([0.001, 1.0, 7.0, 31.0, 100.0]), heard=st.booleans())
    def time(self, seconds, heard):
        self.now += seconds
        if heard:
            for node in self.pay.pool.nodes.values():
                node.seen_at = self.now
        self.pay.tick(self.now)

    @rule(which=st.integers(0, 1), price=st.integers(1, 500_000), mu=st.none() | st.floats(0.1, 100))
    def activate(self, which, price, mu):
        if PEERS[which] in self.pay.by_peer:
            return
        settlement = self.settlement()
        settlement.open(PEERS[which], price, mu)
        self.commit_pay(settlement)

    @rule(which=st.integers(0, 1), mu=st.floats(0.1, 100))
    def measure(self, which, mu):
        one = self.pay.of(PEERS[which])
        if one is not None and one.account.rho is None:
            settlement = self.settlement()
            settlement.measured(one.number, mu)
            self.commit_pay(settlement)

    @rule(which=st.integers(0, 1))
    def release(self, which):
        one = self.pay.of(PEERS[which])
        if one is not None:
            settlement = self.settlement()
            settlement.release(one.number, self.wall)
            self.commit_pay(settlement)

    @rule()
    def sweep(self):
        settlement = self.settlement()
        settlement.pass_time()
        self.commit_pay(settlement)

    @rule(which=st.integers(0, 2), samples=st.integers(1, 4))
    def grant(self, which, samples):
        self.pay.expire(self.now)
        number = self.pay.by_peer.get(PEERS[which])
        if self.pay.refusal(number, samples, LEASE_SECONDS):
            return
        self.number += 1
        lease = LeaseEntry(
            self.number.to_bytes(16), PEERS[which], "eval", Span(self.number, 0, samples), 0, bytes(32), 4,
            self.now, self.now + LEASE_SECONDS, account=number,
        )  # fmt: skip
        with self.ledger.transaction() as connection:
            new = records.new_leases("r", [lease], duration_seconds=LEASE_SECONDS, wall=self.wall)
            records.record(connection, [new], wall=self.wall, actor="a", action="b", kind="flow")
        self.pay.grant([lease], LEASE_SECONDS)
        self.leases[lease.lease_id] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), state=st.sampled_from(["held", "held", "held", "stale", "rejected", "duplicate"]))
    def arrive(self, data, state):
        self.deliver(self.leases.pop(data.draw(st.sampled_from(sorted(self.leases)))), state)

    @rule(which=st.integers(0, 1), closes=st.booleans(), killed=st.booleans())
    def late(self, which, closes, killed):
        """A slice that is wanted comes after its time, perhaps when its account is closed, perhaps after a restart."""
        self.activate(which=which, price=1_000, mu=1.0)
        if closes:
            self.grant(which=which, samples=2)
        self.grant(which=which, samples=2)
        lease = self.leases.pop(self.number.to_bytes(16), None)
        self.now += LEASE_SECONDS + 1
        if closes:
            self.consume_all(PEERS[which])
            self.release(which=which)
            self.sweep()
        if killed:
            self.end_on_record(lease)
            self.start()
        if lease is not None:
            self.deliver(lease, "held")

    def consume_all(self, peer):
        for each in [lease for lease in self.leases.values() if lease.peer == peer]:
            self.deliver(self.leases.pop(each.lease_id), "held")
        changes = self.changes()
        for entry in [entry for entry in self.run.unfinished.values() if entry.peer == peer]:
            changes.finish(entry, "consumed", "")
            self.decide(entry, "consumed")
        self.commit(changes)

    def end_on_record(self, lease):
        if lease is not None:
            change = records.ended_leases({lease.lease_id: "expired"})
            with self.ledger.transaction() as connection:
                records.record(connection, [change], wall=self.wall, actor="a", action="b", kind="flow")

    def deliver(self, lease, state):
        changes = self.changes()
        in_time = self.pay.in_time(lease.lease_id)
        if lease.account is not None:
            with self.ledger.reading() as connection:
                self.pay.revive(connection, lease.account, self.now, self.wall)
            if state == "held" and not in_time and changes.pay.refusal(lease.account, lease.span.count, LEASE_SECONDS):
                state = "stale"
        for sample in lease.span.samples:
            entry = RolloutEntry(
                0, lease.lease_id, sample, lease.peer, "eval", lease.span.ordinal, 0, "held", "", "stop", b"", b"",
                account=lease.account, in_time=in_time,
            )  # fmt: skip
            changes.arrive(entry, state)
            if state != "held":
                self.decide(entry, state)
        self.commit(changes)

    @precondition(lambda self: self.run.unfinished)
    @rule(
        data=st.data(), state=st.sampled_from(["consumed", "stale", "withdrawn", "rejected"]), count=st.integers(1, 5)
    )
    def finish(self, data, state, count):
        keys = sorted(self.run.unfinished)
        chosen = {data.draw(st.sampled_from(keys)) for _ in range(count)}
        suspended = state == "withdrawn" and data.draw(st.booleans())
        changes = self.changes()
        for key in sorted(chosen):
            entry = self.run.unfinished[key]
            changes.finish(entry, state, "", suspended=suspended)
            self.decide(entry, state, suspended=suspended)
        self.commit(changes)

    def decide(self, entry, state, *, suspended=False):
        if payable(state, in_time=entry.in_time, suspended=suspended):
            self.credits += RATES.consumed if state == "consumed" else RATES.stale
            if entry.account is not None:
                self.counted[entry.account] = self.counted.get(entry.account, 0) + 1

    @rule(data=st.data(), state=st.sampled_from(["consumed", "stale"]))
    def lost_commit(self, data, state):
        """The transaction fails, or the process dies in it: as if nothing had been said."""
        if not self.run.unfinished:
            return
        changes = self.changes()
        changes.finish(self.run.unfinished[data.draw(st.sampled_from(sorted(self.run.unfinished)))], state, "")
        try:
            with self.ledger.transaction() as connection:
                changes.record(connection, wall=self.wall, actor="a", action="b", kind="flow")
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass

    @rule(seconds=st.sampled_from([0.0, 5.0, 2 * GAP_SECONDS_MAX]))
    def kill(self, seconds):
        self.now += seconds
        self.start()

    @invariant()
    def books_are_right(self):
        table = schema.accounts
        with self.ledger.reading() as connection:
            rows = {row.number: row for row in connection.execute(sa.select(table))}
            posted = list(accounts.read(connection))
        for number, row in rows.items():
            assert row.rollouts == self.counted.get(number, 0)
            exact = min(
                Fraction(row.rollouts * (row.rho or 0), 10**6), Fraction(row.price * row.milliseconds, 3_600_000)
            )
            assert exact - 1 < row.entered <= exact
        by_unit = {unit: sum(each.amount_micros for each in posted if each.unit == unit) for unit in ("usd", "credit")}
        assert by_unit == {"usd": sum(row.entered for row in rows.values()), "credit": self.credits}
        assert by_unit["usd"] == self.pay.spent <= LIMIT
        outstanding = sum(entry.account is not None for entry in self.run.unfinished.values())
        outstanding += sum(each.samples for each in self.pay.out.values() if each.account is not None)
        assert outstanding == sum(one.account.outstanding for one in self.pay.engaged.values())


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
