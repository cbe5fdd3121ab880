"""What the activation loop is given, remembers and decides: frozen records, fit for JSON and for an audit log. Pure.

Rates are in rollouts per second, money in micro-dollars an hour, times in seconds of the caller's clock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from . import capacity

if TYPE_CHECKING:
    from collections.abc import Mapping

Action = Literal["activate", "release", "none"]
Cause = Literal[
    "impossible",
    "empty",
    "lost",
    "starved",
    "short",
    "surplus",
    "saving",
    "free",
    "unmeasured",
    "infeasible",
    "idle",
    "over",
    "steady",
]


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator may set. Periods are of `period_seconds`; money is micro-dollars an hour."""

    period_seconds: float = 60.0
    gamma: float = capacity.GAMMA
    margin: float = 0.1
    urgent_periods: float = 1.0
    """How long mu_pool must be below mu_min. Other deviations cost money, not the learner's time: they can wait."""
    slow_periods: float = 3.0
    hold_periods: float = 10.0
    smooth_periods: float = 2.0
    """Half-life of mu in the loop's eyes; 0 = as measured."""
    doubt: float = 0.3
    """After a loss: how much less than it looks one node's mu may be, relative; of n alike, doubt / sqrt(n). Three
    standard deviations of 20 % noise that is drawn each period, smoothed, with a benchmark up to 10 % off."""
    saving_min: float = 0.2
    price_ceiling: int | None = None
    """A node that asks more is no candidate."""
    spend_ceiling: int | None = None
    """All working nodes together cost at most this."""
    nocost_seed: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that is fit to work. `mu` rollouts per second, None while unmeasured; `price` it asks for an hour."""

    peer: str
    mu: float | None
    price: int
    available: bool = True
    """a_i: it is heard of, and does not say that it is away."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a run needs. `mu_min` is None while unmeasured, or where no rate is enough: then `infeasible` says why."""

    run: str
    mu_min: float | None
    weight: float = 1.0
    infeasible: str = ""
    mu_start: float | None = None
    """The target while unmeasured, for example from `echo2 plan`."""


@dataclass(frozen=True, slots=True)
class Look:
    """The pool and the runs, measured at one moment. A node that is not among the candidates has gone."""

    candidates: tuple[Candidate, ...]
    needs: tuple[Need, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A node works for a run, on the terms that held when it was activated. `mu` is 0 until there is one."""

    run: str
    since: float
    mu: float
    price: int


@dataclass(frozen=True, slots=True)
class Considered:
    """A candidate in a decision. `rho` in micro-dollars per rollout, None where mu is not known."""

    peer: str
    mu: float
    price: int
    rho: float | None
    chosen: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision with its numbers, fit for an audit log. Rates per second, money in micro-dollars an hour."""

    at: float
    run: str
    action: Action
    cause: Cause
    chosen: tuple[str, ...]
    reason: str
    mu_pool: float
    mu_min: float | None
    mu_target: float | None
    mu_after: float
    price_before: int
    price_after: int
    gamma: float
    share: float = 1.0
    """Of gamma mu_min, where the pool cannot make every run's."""
    deviation_seconds: float = 0.0
    """How long it had lasted."""
    considered: tuple[Considered, ...] = ()
    considered_count: int = 0
    lapsed: tuple[str, ...] = ()
    """Who was away and lost its place to those chosen."""

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class State:
    """What the loop remembers. `since` of (run, deviation): when it began; `changed` of a peer: its last change."""

    assigned: Mapping[str, Assignment] = field(default_factory=dict)
    changed: Mapping[str, float] = field(default_factory=dict)
    since: Mapping[tuple[str, Cause], float] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    """Who was assigned and available at the last look."""
    lost_at: float = float("-inf")
    """When one of them was last found gone."""
    standing: Mapping[str, Cause] = field(default_factory=dict)
    """What each run's last word was, so that a reason is recorded once and not at each look."""
    mu: Mapping[str, float] = field(default_factory=dict)
    """Smoothed."""
    looked_at: float = float("-inf")
    missing: Mapping[str, str] = field(default_factory=dict)
    """Of each that was seen to go, and is not back: the run whose gap it has left, until its place is given away."""
    here: frozenset[str] = frozenset()
    """Who of all candidates was available at the last look."""
