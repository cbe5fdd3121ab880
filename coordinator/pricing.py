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
    rho: int
    rollouts: int = 0
    """Payable so far."""
    milliseconds: int = 0
    """At work so far: activated, alive, by the coordinator's clock."""
    entered: int = 0
    """Micro-dollars in entries so far."""
    outstanding: int = 0
    """Samples leased whose slices are still welcome: those of expired leases too, until their groups are closed."""
    closed: bool = False
    """Its node was released and everything of it is decided: nothing more can become due."""

    @property
    def cap(self) -> int:
        """c_i x time at work, in micro-dollars."""
        return self.price * self.milliseconds // MILLISECONDS_PER_HOUR

    @property
    def earned(self) -> int:
        """Rollouts x rho, in micro-dollars."""
        return self.rollouts * self.rho // PICO_PER_MICRO

    @property
    def due(self) -> int:
        """What the node has a right to."""
        return min(self.earned, self.cap)

    @property
    def liability(self) -> int:
        """The most that its entries may add up to: with all that is out, and as much time as that takes."""
        return self.entered if self.closed else _cost(self.rollouts + self.outstanding, self.rho)


def open_account(peer: str, run: str, *, price: int, mu: float) -> Account:
    """The account of a node that is activated now, at the price it asked for and the rate it was measured at."""
    return Account(peer, run, price, rho_pico(price, mu))


def lease(account: Account, samples: int) -> Account:
    """So many more samples are out with the node."""
    return replace(account, outstanding=account.outstanding + samples)


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

    def refusal(self, accounts: Iterable[Account], samples: int, rho: int) -> str:
        """Why a lease of so many samples is not granted, for its node and the operator; empty when it may be."""
        if self.limit is None or rho == 0:
            return ""
        known = list(accounts)
        committed = sum(account.liability for account in known)
        if committed + _cost(samples, rho) <= self.limit:
            return ""
        spent = sum(account.entered for account in known)
        return (
            f"the run's budget of {dollars(self.limit)} is reached: {dollars(spent)} spent, "
            f"{dollars(committed - spent)} may still become due; raise it, or stop the run"
        )

    def samples_max(self, accounts: Iterable[Account], rho: int) -> int | None:
        """How many samples may still be leased at this rho (pico-dollars per rollout); None: any number."""
        if self.limit is None or rho == 0:
            return None
        left = self.limit - sum(account.liability for account in accounts)
        return max(0, left) * PICO_PER_MICRO // rho


def _cost(samples: int, rho: int) -> int:
    """Micro-dollars, rounded up: what is set aside is never less than what may be due."""
    return -(-samples * rho // PICO_PER_MICRO)
