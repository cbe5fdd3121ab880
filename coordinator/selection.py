"""Which nodes to rent: the cheapest set whose rollouts per second reach a target (DESIGN section 7, equation 3). Pure.

minimise  sum of price_i over i in A     such that  sum of mu_i over i in A >= target

| offers          | how                                                                                             |
|-----------------|-------------------------------------------------------------------------------------------------|
| up to EXACT_MAX | exact, by meeting in the middle: 2 x 2^8 subsets at most, in a bounded time whatever the numbers |
| more            | the best of three: cheapest rho until the target, pruned; each shorter prefix of that with the  |
|                 | cheapest single node that finishes it, pruned; and exact on the EXACT_MAX offers around the     |
|                 | node at which the target was reached, the cheaper ones taken, the dearer ones left              |

The last of the three is why large pools are not harder: far from the break rho decides, near it the sizes do.
A price is in micro-dollars an hour, an integer: sums of floats would make equal sets differ.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EXACT_MAX = 16
"""Offers solved exactly: 2 x 256 subsets, about a millisecond; 20 would still be some milliseconds."""

FINISHED_PREFIXES = 32
"""Prefixes that are tried with a single finisher, the longest first: a shorter one would need a giant."""

SLACK = 1e-9
"""Relative: sums in another order may differ in their last bits, and a target reached exactly is reached."""

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Offer:
    """A node that may be rented: rollouts per second (0 only for one that is to be tried) and micro-dollars an hour."""

    peer: str
    mu: float
    price: int

    @property
    def rho(self) -> float:
        """Micro-dollars per rollout: (c_i / 3600) / mu_i; infinite for what makes nothing."""
        return self.price / SECONDS_PER_HOUR / self.mu if self.mu > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Cover:
    """A set of offers, in the order of rho, and whether it reaches the target that it was made for."""

    chosen: tuple[Offer, ...]
    reached: bool

    @property
    def price(self) -> int:
        """Micro-dollars an hour."""
        return price_of(self.chosen)

    @property
    def mu(self) -> float:
        """Rollouts per second."""
        return mu_of(self.chosen)

    @property
    def peers(self) -> frozenset[str]:
        """Who was chosen."""
        return frozenset(offer.peer for offer in self.chosen)


def by_rho(offers: Iterable[Offer]) -> list[Offer]:
    """Cheapest first; of equals the faster one, then by name, so that equal pools give equal choices."""
    return sorted(offers, key=lambda offer: (offer.rho, -offer.mu, offer.peer))


def mu_of(offers: Iterable[Offer]) -> float:
    """Rollouts per second of all of them."""
    return sum(offer.mu for offer in offers)


def price_of(offers: Iterable[Offer]) -> int:
    """Micro-dollars an hour of all of them."""
    return sum(offer.price for offer in offers)


def cheapest_cover(offers: Iterable[Offer], target: float, *, exact_max: int = EXACT_MAX) -> Cover:
    """The cheapest set that makes `target` rollouts per second; all offers, not `reached`, where none does."""
    order = by_rho(offers)
    need = target - SLACK * abs(target)
    if need <= 0:
        return Cover((), reached=True)
    if mu_of(order) < need:
        return Cover(tuple(order), reached=False)
    if len(order) <= exact_max:
        return Cover(tuple(_exact(order, need)), reached=True)
    sets = [*_finished(order, need), _core(order, need, exact_max)]
    return Cover(tuple(min(sets, key=_goodness)), reached=True)


def in_order(offers: Iterable[Offer], target: float) -> Cover:
    """The first of `offers`, as they come, that reach `target`: the choice of one who does not look at prices."""
    taken: list[Offer] = []
    need = target - SLACK * abs(target)
    for offer in offers:
        if mu_of(taken) >= need:
            break
        taken.append(offer)
    return Cover(tuple(taken), reached=mu_of(taken) >= need)


def _goodness(offers: Iterable[Offer]) -> tuple[int, int, float]:
    """Smaller is better: cheaper, then fewer nodes (each costs a broadcast), then the faster set."""
    chosen = list(offers)
    return price_of(chosen), len(chosen), -mu_of(chosen)


def _break(order: Sequence[Offer], need: float) -> int:
    """How many of the first reach `need`; all where only a sum in another order does."""
    total = 0.0
    for end, offer in enumerate(order, 1):
        total += offer.mu
        if total >= need:
            return end
    return len(order)


def _finished(order: list[Offer], need: float) -> list[list[Offer]]:
    """The cheapest prefix that reaches `need`, and shorter ones with their best single finisher; all pruned."""
    end = _break(order, need)
    sets = [_pruned(order[:end], need)]
    for length in range(end - 1, max(-1, end - 1 - FINISHED_PREFIXES), -1):
        missing = need - mu_of(order[:length])
        finishers = [offer for offer in order[length:] if offer.mu >= missing]
        if finishers:
            last = min(finishers, key=lambda offer: (offer.price, -offer.mu, offer.peer))
            sets.append(_pruned([*order[:length], last], need))
    return sets


def _pruned(chosen: list[Offer], need: float) -> list[Offer]:
    """Without those that it can do without, the dearest first."""
    total, dropped = mu_of(chosen), set[str]()
    for offer in sorted(chosen, key=lambda each: (-each.price, each.mu, each.peer)):
        if total - offer.mu >= need:
            dropped.add(offer.peer)
            total -= offer.mu
    kept = [offer for offer in chosen if offer.peer not in dropped]
    return kept if mu_of(kept) >= need else chosen  # the last bit of a sum in another order


def _core(order: list[Offer], need: float, width: int) -> list[Offer]:
    """Cheaper offers than the core are taken, dearer ones are not, the core is exact; `order` as a whole is enough."""
    end = _break(order, need)
    first = max(0, min(end - width // 2, len(order) - width))
    taken, core = order[:first], order[first : first + width]
    return [*taken, *_exact(core, need - mu_of(taken))]


Subset = tuple[float, int, int, int]
"""mu, price, number of offers, and which: a bit each."""


def _exact(offers: Sequence[Offer], need: float) -> list[Offer]:
    """The best subset that reaches `need`; all of them together do."""
    if need <= 0:
        return []
    half = len(offers) // 2
    left, right = _subsets(offers[:half]), sorted(_subsets(offers[half:]))
    reach = [mu for mu, _, _, _ in right]
    best_from: list[Subset] = list(right)  # of all right subsets that are at least as fast
    for index in range(len(right) - 2, -1, -1):
        best_from[index] = min(right[index], best_from[index + 1], key=_cheaper)
    found: tuple[tuple[int, int, float], int] | None = None
    for mu, price, count, mask in left:
        index = bisect_left(reach, need - mu)
        if index == len(right):
            continue
        other = best_from[index]
        key = (price + other[1], count + other[2], -(mu + other[0]))
        if found is None or key < found[0]:
            found = (key, mask | other[3] << half)
    if found is None:  # all of them reach it but for the last bit of a sum in another order
        return list(offers)
    return [offer for bit, offer in enumerate(offers) if found[1] >> bit & 1]


def _subsets(offers: Sequence[Offer]) -> list[Subset]:
    made: list[Subset] = [(0.0, 0, 0, 0)]
    for bit, offer in enumerate(offers):
        made += [(mu + offer.mu, price + offer.price, count + 1, mask | 1 << bit) for mu, price, count, mask in made]
    return made


def _cheaper(subset: Subset) -> tuple[int, int, float]:
    mu, price, count, _ = subset
    return price, count, -mu
