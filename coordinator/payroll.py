"""What nodes are owed, as it happens: `pricing` decides, this keeps the accounts and the ledger's rows the same.

| event                       | what it does to the account of the activation                                        |
|-----------------------------|--------------------------------------------------------------------------------------|
| a paid node is activated    | opened at its price; rho is set then, or once the node is measured                   |
| leases are granted          | their samples are out, set aside for the lease's duration                            |
| the duration is over        | nothing is set aside any more: a node that is gone does not tie up a run's budget    |
| a slice comes after that    | its samples are set aside anew, if they are wanted; where the budget has no room     |
|                             | for them they are late                                                               |
| a rollout's terminal state  | booked, paid or not, in the transaction that records the state                       |
| time passes, node alive     | raises the cap; on record with each booking and at least each SAVE_SECONDS           |
| the node is released        | no more leases; closed when all that was out is decided and nothing is held          |
| and holds leases of it      | time at work goes on, until it is activated anew, here or in another run: each       |
|                             | second is counted on one account                                                     |

So each sample is decided once, by the row of its rollout. After a `kill -9` the rows say all of it: what is out is
what was leased and did not come; those leases have their whole duration again. Of the time at work, what passed since
it was last on record counts if the node is heard of soon enough: GAP_SECONDS_MAX.

A slice is *in time* while its lease is set aside. Every lease is, a volunteer's too: credits depend on it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import sqlalchemy as sa

from . import accounts, pricing, schema
from .cells import sound
from .counters import Numbers
from .history import Insert, Update

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .history import Change
    from .leases import LeaseBook, LeaseEntry
    from .pool import Pool
    from .pricing import Account, Budget, CreditRates
    from .records import RolloutEntry

SAVE_SECONDS = 60.0
"""Between two records of nothing but time."""

GAP_SECONDS_MAX = 120.0
"""For so long without a record of its time at work, a node is taken to have worked on: two of them and a restart."""

ACTOR = "coordinator"

COLUMNS = ("mu", "rho", "rollouts", "milliseconds", "entered", "counted", "released", "closed")


@dataclass(frozen=True, slots=True)
class Engagement:
    """One activation of a paid node. `counted_at`: monotonic seconds, until when its time at work is counted."""

    number: int
    account: Account
    mu: float | None
    counted_at: float
    released: float | None = None
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A lease that is out: what is set aside for it, until when."""

    account: int | None
    samples: int
    until: float


@dataclass(slots=True)
class Payroll:
    """The accounts of one run in memory. Changed by `Settlement.apply`, after the commit, and by time."""

    run: str
    rates: CreditRates
    budget: Budget
    pool: Pool
    leases: LeaseBook
    engaged: dict[int, Engagement] = field(default_factory=dict)
    """By number: accounts that are not closed."""
    by_peer: dict[str, int] = field(default_factory=dict)
    """Whose node is activated now."""
    out: dict[bytes, Reservation] = field(default_factory=dict)
    """By lease, in the order in which their time is over."""
    closed_entered: int = 0
    """Micro-dollars of accounts that are closed."""
    numbers: Numbers = field(default_factory=Numbers)
    """Shared with the other runs of the ledger."""
    refused: tuple[int | None, int] | None = None
    """The account and the samples that the budget last refused."""

    # what a request asks

    def known(self) -> Iterable[Account]:
        """Every account; all that are closed as one."""
        yield pricing.Account("", self.run, 0, 0, entered=self.closed_entered, closed=True)
        yield from (one.account for one in self.engaged.values())

    @property
    def spent(self) -> int:
        """Micro-dollars posted."""
        return sum(account.entered for account in self.known())

    @property
    def committed(self) -> int:
        """Micro-dollars that may still become due of what is out."""
        return sum(account.liability - account.entered for account in self.known())

    @property
    def cost_hour(self) -> int:
        """What the nodes that are activated ask together, in micro-dollars an hour."""
        return sum(self.engaged[number].account.price for number in self.by_peer.values())

    def of(self, peer: str) -> Engagement | None:
        """The activation in force."""
        number = self.by_peer.get(peer)
        return None if number is None else self.engaged[number]

    def refusal(self, number: int | None, samples: int, seconds: float, promised: int = 0) -> str:
        """Why so many samples are not leased to this account for so long; empty when they may be. `promised`:
        micro-dollars that may become due beside what is on the accounts."""
        if number is None or self.budget.limit is None:
            return ""
        before = self.engaged[number].account
        after = pricing.lease(before, samples, round(seconds * 1000))
        told = self.budget.refusal(self.known(), promised + after.liability - before.liability)
        self.refused = (number, samples) if told else None
        return told

    def samples_max(self, number: int | None) -> int | None:
        """How many samples the budget allows this account; None: any number."""
        if number is None or self.budget.limit is None:
            return None
        return self.budget.samples_max(self.known(), self.engaged[number].account)

    def waiting(self, seconds: float) -> str:
        """Why nothing is leased, if the budget is why; asked anew, so that it ends when there is room."""
        if self.refused is None or self.refused[0] not in self.engaged:
            return ""
        return self.refusal(*self.refused, seconds)

    def in_time(self, lease_id: bytes) -> bool:
        """Whether a slice for this lease comes within its duration now."""
        return lease_id in self.out

    # what time does

    def tick(self, now: float) -> None:
        """Count time at work of all; the same for what is set aside."""
        self.expire(now)
        for one in list(self.engaged.values()):
            self.engaged[one.number] = self.counted(one, now)

    def expire(self, now: float) -> None:
        """What is set aside for leases whose time is over is free again. Looks at those alone: each request asks."""
        while self.out:
            lease_id, reserved = next(iter(self.out.items()))
            if reserved.until >= now:
                break
            del self.out[lease_id]
            self._unpaid(reserved)

    def _unpaid(self, reserved: Reservation) -> None:
        one = self.engaged.get(reserved.account or 0)
        if one is not None:
            left = replace(one.account, outstanding=one.account.outstanding - reserved.samples)
            self.engaged[one.number] = replace(one, account=left)

    def counted(self, one: Engagement, now: float) -> Engagement:
        """With its time at work until now."""
        node = self.pool.nodes.get(one.account.peer)
        if node is None or node.seen_at is None:  # not heard of since this coordinator started
            return one if now - one.counted_at <= GAP_SECONDS_MAX else replace(one, counted_at=now)
        passed = int((now - one.counted_at) * 1000)
        if passed <= 0:
            return one
        works = one.released is None or (self.holds(one) and one.number == node.account)
        if not works or node.health(now, self.pool.heartbeat_seconds) == "dead":
            return replace(one, counted_at=now)
        account = replace(one.account, milliseconds=one.account.milliseconds + passed)
        return replace(one, account=account, counted_at=one.counted_at + passed / 1000)

    def holds(self, one: Engagement) -> bool:
        """Whether leases that are paid from this account are out."""
        return any(lease.account == one.number for lease in self.leases.held_by(one.account.peer))

    # what is durable

    def grant(self, leases: Iterable[LeaseEntry], seconds: float) -> None:
        """These leases are given out."""
        for count, lease in enumerate(leases):  # they are held side by side
            self.reserve(lease.lease_id, lease.account, lease.span.count, lease.expires_at, 0.0 if count else seconds)

    def take_back(self, leases: Iterable[LeaseEntry], seconds: float) -> None:
        """They were given out by one `grant` and could not be made durable: nobody was told of them."""
        for count, lease in enumerate(leases):
            del self.out[lease.lease_id]
            if lease.account is not None:
                one = self.engaged[lease.account]
                ahead = 0.0 if count else seconds
                account = pricing.lease(one.account, -lease.span.count, -round(ahead * 1000))
                self.engaged[lease.account] = replace(one, account=account)

    def reserve(self, lease_id: bytes, number: int | None, samples: int, until: float, seconds: float) -> None:
        """Set a lease's samples aside."""
        self.out[lease_id] = Reservation(number, samples, until)
        if number is not None:
            one = self.engaged[number]
            account = pricing.lease(one.account, samples, round(seconds * 1000))
            self.engaged[number] = replace(one, account=account)

    def revive(self, connection: sa.Connection, number: int, now: float, wall: float) -> None:
        """Have an account at hand that was closed: a slice came for a lease of it after all."""
        if number in self.engaged:
            return
        table = schema.accounts
        (row,) = sound(connection.execute(sa.select(table).where(table.c.number == number)), table)
        if row.closed is not None:
            self.closed_entered -= row.entered
        self.engaged[number] = engagement(row, now, wall)


class Settlement:
    """What one transaction does to accounts. Told of each rollout; `changes` and `post` in it, `apply` after it."""

    def __init__(self, payroll: Payroll, now: float) -> None:
        self._payroll = payroll
        self._now = now
        self._decided: dict[int, list[int]] = {}
        """By account: samples newly set aside, payable, not payable."""
        self._credits: Counter[tuple[str, str]] = Counter()
        self._returned: set[bytes] = set()
        self._after: dict[int, Engagement] = {}
        self._opened: list[Engagement] = []
        self._entries: list[pricing.Entry] = []
        self._closed: list[Engagement] = []

    # told of rollouts

    def arrive(self, entry: RolloutEntry, state: str, *, terminal: bool) -> None:
        """A rollout came, and is held or decided at once."""
        reserved = entry.lease_id in self._payroll.out
        self._returned.add(entry.lease_id)
        if terminal:
            self._decide(entry, state, suspended=False, out=reserved)
        elif not reserved and entry.account is not None:
            self._of(entry.account)[0] += 1

    def finish(self, entry: RolloutEntry, state: str, *, suspended: bool) -> None:
        """A rollout that was held or admitted is decided."""
        self._decide(entry, state, suspended=suspended, out=True)

    def refusal(self, number: int, samples: int, seconds: float) -> str:
        """Why the budget has no room to set samples aside anew, with what this transaction does already."""
        leased = {other: decided[0] for other, decided in self._decided.items() if decided[0]}
        mine = leased.pop(number, 0)
        known = {other: self._payroll.engaged[other].account for other in leased}
        promised = sum(
            pricing.lease(account, leased[other]).liability - account.liability for other, account in known.items()
        )
        return self._payroll.refusal(number, samples + mine, seconds, promised)

    def _decide(self, entry: RolloutEntry, state: str, *, suspended: bool, out: bool) -> None:
        paid = pricing.payable(state, in_time=entry.in_time, suspended=suspended)
        if paid:
            self._credits[entry.peer, state] += 1
        if entry.account is not None and out:
            self._of(entry.account)[1 if paid else 2] += 1

    def _of(self, number: int) -> list[int]:
        return self._decided.setdefault(number, [0, 0, 0])

    # told of nodes

    def open(self, peer: str, price: int, mu: float | None) -> None:
        """A paid node is activated."""
        number = self._payroll.numbers.account + len(self._opened)
        account = pricing.open_account(peer, self._payroll.run, price=price, mu=mu)
        self._opened.append(Engagement(number, account, mu, self._now))

    def release(self, number: int, wall: float) -> None:
        """It is released."""
        self._after[number] = replace(self._one(number), released=wall)

    def measured(self, number: int, mu: float) -> None:
        """It has its rho, for good."""
        one = self._one(number)
        payroll = self._payroll
        others = [self._one(other).account for other in payroll.engaged if other != number]
        room = payroll.budget.room(others)
        room = None if room is None else room - payroll.closed_entered
        self._after[number] = replace(one, mu=mu, account=pricing.measured(one.account, mu, room))

    def pass_time(self) -> None:
        """Book what has become due by time alone, and close what can come to no more."""
        payroll = self._payroll
        for number, one in payroll.engaged.items():
            node = payroll.pool.nodes.get(one.account.peer)
            # Of one that was moved its rate in another run is measured now: another number.
            if one.released is not None and one.account.rho is None and node is not None and payroll.pool.has(node):
                rate = node.meter.rate(self._now)
                if rate:
                    self.measured(number, rate)
            self._after.setdefault(number, self._one(number))
            if one.released is not None and not one.account.outstanding and not payroll.holds(one):
                self._closed.append(one)

    # in the transaction

    def changes(self, wall: float) -> list[Change]:
        """The rows of accounts. Once."""
        payroll = self._payroll
        found: list[Change] = []
        for number in sorted({*self._decided, *self._after}):
            leased, paid, unpaid = self._decided.get(number, (0, 0, 0))
            one = self._one(number)
            account, entry = pricing.book(pricing.lease(one.account, leased), rollouts=paid, unpaid=unpaid)
            self._after[number] = replace(one, account=account)
            if entry is not None:
                self._entries.append(entry)
        for (peer, state), count in sorted(self._credits.items()):
            mine = pricing.Credits(peer, payroll.run)
            credit = pricing.credit_rollouts(mine, payroll.rates, state=state, count=count, in_time=True)
            if credit is not None:
                self._entries.append(credit)
        closed = {one.number for one in self._closed}
        if self._after:
            rows = [(number, *self._row(one, wall, number in closed)) for number, one in sorted(self._after.items())]
            found.append(Update("accounts", COLUMNS, rows))
        if self._opened:
            found.append(self._inserted(wall))
        return found

    def post(self, connection: sa.Connection, wall: float) -> None:
        """What became due, into the chain. After `changes`."""
        entries = [
            accounts.Entry(
                each.run, each.peer, each.kind, each.unit, each.amount_micros, each.quantity, ACTOR, each.reason
            )
            for each in self._entries
        ]
        accounts.append(connection, entries, wall=wall)

    def apply(self) -> None:
        """It is durable."""
        payroll = self._payroll
        for lease_id in self._returned:
            payroll.out.pop(lease_id, None)
        payroll.engaged |= self._after
        for one in self._after.values():
            if one.released is not None and payroll.by_peer.get(one.account.peer) == one.number:
                del payroll.by_peer[one.account.peer]
        for one in self._closed:
            payroll.closed_entered += payroll.engaged.pop(one.number).account.entered
        for one in self._opened:
            payroll.engaged[one.number] = one
            payroll.by_peer[one.account.peer] = one.number
            node = payroll.pool.nodes.get(one.account.peer)
            if node is not None:
                node.account = one.number
        payroll.numbers.account += len(self._opened)

    def _one(self, number: int) -> Engagement:
        known = self._after.get(number)
        return known or self._payroll.counted(self._payroll.engaged[number], self._now)

    def _row(self, one: Engagement, wall: float, closed: bool) -> tuple[object, ...]:
        account = one.account
        counted = wall - max(self._now - one.counted_at, 0.0)
        paid = (account.rollouts, account.milliseconds, account.entered)
        return one.mu, account.rho, *paid, counted, one.released, wall if closed else None

    def _inserted(self, wall: float) -> Insert:
        columns = ("number", "peer", "price", *COLUMNS)
        rows = [
            (one.number, one.account.peer, one.account.price, *self._row(one, wall, closed=False))
            for one in self._opened
        ]
        return Insert("accounts", columns, rows, {"run": self._payroll.run, "opened": wall})


def engagement(row: sa.Row[tuple[object, ...]], now: float, wall: float) -> Engagement:
    """A row of the table, with nothing out."""
    account = pricing.Account(
        row.peer,
        row.run,
        row.price,
        row.rho,
        rollouts=row.rollouts,
        milliseconds=row.milliseconds,
        entered=row.entered,
    )
    gap = wall - row.counted
    counted_at = now - gap if 0 <= gap <= GAP_SECONDS_MAX else now
    return Engagement(row.number, account, row.mu, counted_at, row.released)


def load_payroll(
    connection: sa.Connection, payroll: Payroll, unfinished: Iterable[RolloutEntry], *, now: float, wall: float
) -> None:
    """The accounts as the ledger has them, and what is out. Raises ValueError for rows that were never written."""
    table = schema.accounts
    mine = table.c.run == payroll.run
    for row in sound(connection.execute(sa.select(table).where(mine, table.c.closed.is_(None))), table):
        one = payroll.engaged[row.number] = engagement(row, now, wall)
        node = payroll.pool.nodes.get(one.account.peer)
        if node is not None:
            node.account = max(node.account, one.number)
        if one.released is None:
            payroll.by_peer[one.account.peer] = one.number
            if one.mu and node is not None:
                node.meter.believe(one.mu, now)
    is_closed = sa.and_(mine, table.c.closed.is_not(None))
    payroll.closed_entered = int(connection.scalar(sa.select(sa.func.sum(table.c.entered)).where(is_closed)) or 0)
    payroll.numbers.account = int(connection.scalar(sa.select(sa.func.max(table.c.number))) or 0) + 1
    for entry in unfinished:
        if entry.account is not None:
            one = payroll.engaged[entry.account]
            payroll.engaged[one.number] = replace(one, account=pricing.lease(one.account, 1))
    leases, rollouts = schema.leases, schema.rollouts
    came = sa.exists().where(rollouts.c.run == payroll.run, rollouts.c.lease_id == leases.c.lease_id)
    lasts = sa.or_(leases.c.ended.is_(None), leases.c.granted + leases.c.duration_seconds >= wall)
    found = connection.execute(sa.select(leases).where(leases.c.run == payroll.run, lasts, ~came))
    kept = [
        # Our wall clock may have been set back meanwhile: no lease lasts longer than it was given for.
        (row.duration_seconds if row.ended is None else min(row.granted - wall, 0.0) + row.duration_seconds, row)
        for row in sound(found, leases)
    ]
    for left, row in sorted(kept, key=lambda each: each[0]):
        if row.account is not None:
            payroll.revive(connection, row.account, now, wall)
        payroll.reserve(row.lease_id, row.account, row.sample_count, now + left, row.duration_seconds)
