"""What the activation loop goes by: mu of each node, smoothed; at least what of it; the target of each run. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .selection import mu_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .activation_records import Candidate, Look, Need, Rules, State
    from .selection import Offer


def smoothed(state: State, look: Look, now: float, rules: Rules) -> dict[str, float]:
    """mu of each node with a half-life of `smooth_periods`: whoever is picked for looking cheap was partly lucky."""
    half_life = rules.smooth_periods * rules.period_seconds
    weight = 1.0 if half_life <= 0 else 1 - 0.5 ** (max(now - state.looked_at, 0.0) / half_life)
    found: dict[str, float] = {}
    for each in look.candidates:
        if each.mu is not None:
            before = state.mu.get(each.peer, each.mu)
            found[each.peer] = before + weight * (each.mu - before)
        elif each.peer in state.mu:
            found[each.peer] = state.mu[each.peer]
    return found


def surely(offers: Sequence[Offer], doubt: float) -> float:
    """What they make together at least, if one of them may make less than it looks by a part of `doubt`.

    Errors that have nothing to do with each other add up as squares: of n alike it is doubt / sqrt(n) less.
    """
    return mu_of(offers) - doubt * math.hypot(*(offer.mu for offer in offers))


def shared_targets(
    candidates: Sequence[Candidate], needs: Sequence[Need], rules: Rules
) -> dict[str, tuple[float | None, float]]:
    """Each run's target, and which part it is of what the run asked for: all, or what its weight gives it."""
    asked = {need.run: need.mu_start if need.mu_min is None else rules.gamma * need.mu_min for need in needs}
    asked = {need.run: None if need.infeasible else asked[need.run] for need in needs}
    ceiling = float("inf") if rules.price_ceiling is None else rules.price_ceiling
    left = sum(each.mu or 0.0 for each in candidates if each.available and each.price <= ceiling)
    given: dict[str, float] = {}
    waiting = [need for need in needs if asked[need.run]]
    if sum(asked[need.run] or 0.0 for need in waiting) <= left or len(waiting) < 2:  # one run: what is missing is said
        return {run: (target, 1.0) for run, target in asked.items()}
    while waiting:
        part = left / sum(need.weight for need in waiting)
        served = [need for need in waiting if (asked[need.run] or 0.0) <= part * need.weight]
        for need in served or waiting:
            given[need.run] = min(asked[need.run] or 0.0, part * need.weight)
        left -= sum(given[need.run] for need in served)
        waiting = [need for need in waiting if need.run not in given]
    return {run: (given.get(run, target), given[run] / target if target else 1.0) for run, target in asked.items()}
