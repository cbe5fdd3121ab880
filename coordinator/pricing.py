"""What nodes are owed, and what a run may still spend (DESIGN section 7). Pure, in integers.

| unit                          | why                                                                             |
|-------------------------------|---------------------------------------------------------------------------------|
| micro-dollars, micro-credits  | what is recorded and paid: whole numbers add up in any order, in SQL, CSV, JSON |
| rho: pico-dollars per rollout | $0.20 an hour at 1 a second is 55.6 micro-dollars a rollout: rounded to those,  |
|                               | one part in a hundred would be lost                                             |
| milliseconds of work          | clocks give no more that two machines could agree on                            |

No entry is computed from a rounded one. What is due is a function of totals, rounded down once, and an entry is what is
due less what was entered before: entries add up to what is due exactly, whatever the order or the number of bookings.

Pay of one activation: due = min(payable rollouts x rho, c_i x time at work), rho fixed when the node was activated. A
node that is faster than was measured is not paid more an hour than it asked; one that is slower is paid for what it
made. A rollout is payable once it is decided and its node is not at fault, so nothing is ever taken back:

| a rollout                                           | is paid and credited                                           |
|-----------------------------------------------------|----------------------------------------------------------------|
| consumed                                            | yes, at the rates of consumed ones                             |
| stale, though it came within its lease's duration   | yes; credited at the rate of stale ones                        |
| stale, and it came after its lease's duration       | no: its slot had been given to another                         |
| withdrawn because the run ended                     | yes; credited as stale                                         |
| withdrawn because its node was suspended            | no                                                             |
| rejected, duplicate                                 | no                                                             |
| evaluated (a held-out prompt)                       | yes, as consumed: the run asked for it                         |

A node that works before it was ever measured has no rho yet: it is set once there is a mu, and what it made until then
counts. mu is rollouts a second of holding leases, so until then it comes to its price for the time of its leases; where
the time of measuring finds less than that left in the budget, rho is what is left.

A run's budget is asked before a lease is granted. What counts against it is what every account may come to with all
that is out, at its full rho: so a run stops leasing before it can owe what it does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from .money import MICRO, dollars

if TYPE_CHECKING:
    from collections.abc import Iterable

PICO_PER_MICRO = 1_000_000
MILLISECONDS_PER_HOUR = 3_600_000
SECONDS_PER_HOUR = 3600
BYTES_PER_GIB = 1 << 30

Unit = Literal["usd", "credit"]
Kind = Literal["credit", "relay"]
"""As the chain of postings has them: what a node earned, in dollars or in credits, for rollouts or for bytes."""


def rho_pico(price: int, mu: float) -> int:
    """(c_i / 3600) / mu_i in pico-dollars per rollout; `price` in micro-dollars an hour, `mu` in rollouts a second."""
    if price == 0:
        return 0
    if mu <= 0:
        raise ValueError(f"a node with mu = {mu} has no price per rollout")
    return round(Decimal(price * PICO_PER_MICRO) / SECONDS_PER_HOUR / Decimal(mu))


@dataclass(frozen=True, slots=True)
class Entry:
    """What is to be posted: millionths of `unit` for `quantity` rollouts, or bytes; never below 0."""

    peer: str
    run: str
    kind: Kind
    unit: Unit
    quantity: int
    amount_micros: int
    reason: str


@dataclass(frozen=True, slots=True)
class Account:
    """What a node is owed for one activation. `price` in micro-dollars an hour; made by `open_account`."""

    peer: str
    run: str
    price: int
    rho: int | None
    """Pico-dollars per rollout, for good once there is one."""
    rollouts: int = 0
    """Payable so far."""
    milliseconds: int = 0
    """At work so far: activated, alive, by the coordinator's clock."""
    entered: int = 0
    """Micro-dollars in entries so far."""
    outstanding: int = 0
    """Samples leased whose slices are still welcome: those of expired leases too, until their groups are closed."""
    ahead: int = 0
    """Milliseconds that its leases may take: what is set aside while there is no rho."""
    closed: bool = False
    """Its node was released and everything of it is decided: nothing more can become due."""

    @property
    def cap(self) -> int:
        """c_i x time at work, in micro-dollars."""
        return self.price * self.milliseconds // MILLISECONDS_PER_HOUR

    @property
    def earned(self) -> int:
        """Rollouts x rho, in micro-dollars; 0 while there is no rho."""
        return self.rollouts * (self.rho or 0) // PICO_PER_MICRO

    @property
    def due(self) -> int:
        """What the node has a right to."""
        return min(self.earned, self.cap)

    @property
    def liability(self) -> int:
        """The most that its entries may add up to: with all that is out, and as much time as that takes."""
        if self.closed:
            return self.entered
        if self.rho is not None:
            return _cost(self.rollouts + self.outstanding, self.rho)
        if not self.rollouts and not self.outstanding:
            return 0
        return -(-self.price * self.ahead // MILLISECONDS_PER_HOUR)


def open_account(peer: str, run: str, *, price: int, mu: float | None) -> Account:
    """The account of a node that is activated now: the price it asked for, the rate it was measured at, if it was."""
    return Account(peer, run, price, None if mu is None else rho_pico(price, mu))


def measured(account: Account, mu: float, room: int | None = None) -> Account:
    """It has its rho now. `room`: micro-dollars that it may come to, of a run's budget; rho is lowered to fit."""
    if account.rho is not None:
        raise ValueError("rho is fixed for the whole activation")
    rho, made = rho_pico(account.price, mu), account.rollouts + account.outstanding
    if room is not None and made:
        rho = min(rho, max(room, 0) * PICO_PER_MICRO // made)
    return replace(account, rho=rho)


def lease(account: Account, samples: int, milliseconds: int = 0) -> Account:
    """So many more samples are out with the node, for so long beyond what was out."""
    return replace(account, outstanding=account.outstanding + samples, ahead=account.ahead + milliseconds)


def close(account: Account) -> Account:
    """Nothing is out any more, and no time will be added."""
    return replace(account, outstanding=0, closed=True)


def book(
    account: Account, *, rollouts: int = 0, milliseconds: int = 0, unpaid: int = 0
) -> tuple[Account, Entry | None]:
    """After so many more payable rollouts and so much more time at work: the entry, None where nothing more is due.

    `unpaid`: samples that were out and will not be payable. Raises ValueError for what was never out.
    """
    if min(rollouts, milliseconds, unpaid) < 0:
        raise ValueError("rollouts and time only grow: what is payable is never taken back")
    if account.closed or rollouts + unpaid > account.outstanding:
        raise ValueError(f"{rollouts + unpaid} samples are decided, {account.outstanding} were out")
    account = replace(
        account,
        rollouts=account.rollouts + rollouts,
        milliseconds=account.milliseconds + milliseconds,
        outstanding=account.outstanding - rollouts - unpaid,
    )
    amount = account.due - account.entered
    if amount == 0:
        return account, None
    capped = account.earned > account.cap
    reason = "pay" + (f", capped at {dollars(account.price)} an hour" if capped else "")
    entry = Entry(account.peer, account.run, "credit", "usd", rollouts, amount, reason)
    return replace(account, entered=account.due), entry


def payable(state: str, *, in_time: bool, suspended: bool = False) -> bool:
    """Whether a rollout in this terminal state is paid for; see the table. `in_time`: within its lease's duration."""
    if state in {"consumed", "evaluated"}:
        return True
    if state == "stale":
        return in_time
    return state == "withdrawn" and not suspended


@dataclass(frozen=True, slots=True)
class CreditRates:
    """What the operator gives, in micro-credits."""

    consumed: int = MICRO
    stale: int = MICRO // 2
    relayed_gib: int = MICRO

    def __post_init__(self) -> None:
        if min(self.consumed, self.stale, self.relayed_gib) < 0:
            raise ValueError("a rate of credits is from 0")


@dataclass(frozen=True, slots=True)
class Credits:
    """A node's credits in one run: totals, and what was entered of them."""

    peer: str
    run: str
    relayed_bytes: int = 0
    relayed_entered: int = 0


def credit_rollouts(
    credits_: Credits, rates: CreditRates, *, state: str, count: int, in_time: bool, suspended: bool = False
) -> Entry | None:
    """The entry for `count` rollouts that reached a terminal state; None where they earn nothing."""
    if count <= 0 or not payable(state, in_time=in_time, suspended=suspended):
        return None
    amount = count * (rates.consumed if state in {"consumed", "evaluated"} else rates.stale)
    return Entry(credits_.peer, credits_.run, "credit", "credit", count, amount, state) if amount else None


def credit_relayed(credits_: Credits, rates: CreditRates, length: int) -> tuple[Credits, Entry | None]:
    """The entry for bytes of a planned transfer that its receiver acknowledged."""
    if length < 0:
        raise ValueError("relayed bytes only grow")
    total = credits_.relayed_bytes + length
    due = max(total * rates.relayed_gib // BYTES_PER_GIB, credits_.relayed_entered)  # a rate may have been lowered
    amount = due - credits_.relayed_entered
    after = replace(credits_, relayed_bytes=total, relayed_entered=due)
    if amount == 0:
        return after, None
    return after, Entry(credits_.peer, credits_.run, "relay", "credit", length, amount, "relayed bytes")


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may spend on nodes, in micro-dollars; `limit` None: as much as it takes."""

    limit: int | None = None

    def refusal(self, accounts: Iterable[Account], more: int) -> str:
        """Why a lease that adds so much (micro-dollars) to what may be due is not granted, for its node and the
        operator; empty when it may be."""
        if self.limit is None or more <= 0:
            return ""
        known = list(accounts)
        committed = sum(account.liability for account in known)
        if committed + more <= self.limit:
            return ""
        spent = sum(account.entered for account in known)
        return (
            f"the run's budget of {dollars(self.limit)} is reached: {dollars(spent)} spent, "
            f"{dollars(committed - spent)} may still become due; raise it, or stop the run"
        )

    def room(self, accounts: Iterable[Account]) -> int | None:
        """What is left when these come to all that they may, in micro-dollars; None: as much as it takes."""
        if self.limit is None:
            return None
        return self.limit - sum(account.liability for account in accounts)

    def samples_max(self, accounts: Iterable[Account], account: Account) -> int | None:
        """How many more samples this one of the accounts may be leased; None: any number."""
        room = self.room(accounts)
        if room is None or account.rho == 0:
            return None
        if account.rho is None:
            return None  # its liability is by time, not by samples
        out = account.rollouts + account.outstanding
        return max(0, (room + account.liability) * PICO_PER_MICRO // account.rho - out)


def _cost(samples: int, rho: int) -> int:
    """Micro-dollars, rounded up: what is set aside is never less than what may be due."""
    return -(-samples * rho // PICO_PER_MICRO)
