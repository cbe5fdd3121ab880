"""Before any money is spent: which pool to rent for a staleness budget S, what a step costs, and whether it fits. Pure.

For each S: kappa (S - 1 unless set), mu_min by equation 2, mu_target = gamma mu_min, the cheapest nodes that make it by
equation 3 (`selection`), and of that pool the forecast of `estimate`. Where equation 2 has no answer, because the
broadcast takes as long as the steps between two, the pool shown makes R rollouts in T_train, and the learner waits.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from . import capacity
from .estimate import Forecast, Plan, Supply, forecast
from .money import MICRO
from .selection import Cover, Offer, cheapest_cover, mu_of

KAPPA_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes of one kind: how many may be had, mu_i of one in rollouts per second, micro-dollars an hour for one."""

    name: str
    count: int
    mu: float
    price: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What is known of a run and of what may be rented. Seconds; `learner_price` in micro-dollars an hour."""

    train_seconds: float
    broadcast_seconds: float
    R: int
    n: int
    classes: tuple[NodeClass, ...]
    learner_price: int = 0
    gamma: float = capacity.GAMMA
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Rented:
    """How many of a class, and the lease of one: samples, and the seconds they take."""

    name: str
    count: int
    offered: int
    lease_samples: int
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """What a staleness budget comes to. Money in dollars; rates in rollouts per second."""

    S: int
    kappa: int
    mu_min: float | None
    mu_target: float
    mu_pool: float
    enough: bool
    """The nodes offered make mu_target, and there is a mu_min."""
    nodes: int
    rented: tuple[Rented, ...]
    dollars_hour: float
    dollars_hour_pool: float
    dollars_step: float
    step_seconds: float
    bound_by: str
    bubble: float
    staleness_bound: int | None
    staleness: int
    lease_samples: int
    lease_seconds: float
    feasible: bool
    advice: tuple[str, ...]
    dollars: float | None = None
    seconds: float | None = None
    """Of the whole run, where its steps are known."""


@dataclass(frozen=True, slots=True)
class Report:
    """The budget asked about, and the others beside it."""

    setup: Setup
    asked: Row
    table: tuple[Row, ...]


def kappa_of(staleness_max: int) -> int:
    """S - 1, and 1 where that is less."""
    return max(1, staleness_max - 1)


def make_plan(setup: Setup, *, S: int, kappa: int | None, table_to: int) -> Report:  # noqa: N803 - the paper's name
    """The plan for S, and one row for each budget from 0 to `table_to` (with a kappa that is set: those it allows)."""
    rows = [row_of(setup, S=each, kappa=kappa or kappa_of(each)) for each in range(table_to + 1) if _fits(kappa, each)]
    return Report(setup, row_of(setup, S=S, kappa=kappa or kappa_of(S)), tuple(rows))


def rent(setup: Setup, target: float) -> Cover:
    """The cheapest nodes of the classes that make `target` rollouts per second; all of them where none do.

    Free ones all work, as the coordinator has it.
    """
    offers = [
        Offer(f"{index:03}/{number:06}", each.mu, each.price)
        for index, each in enumerate(setup.classes)
        for number in range(min(each.count, math.ceil(target / each.mu)) if each.price else each.count)
    ]
    free = [offer for offer in offers if not offer.price]
    paid = cheapest_cover([offer for offer in offers if offer.price], target - mu_of(free))
    return Cover((*free, *paid.chosen), reached=paid.reached)


def row_of(setup: Setup, *, S: int, kappa: int) -> Row:  # noqa: N803 - the paper's name
    """One budget's pool, price, staleness and lease. At least one node is offered; T_train and every mu are above 0."""
    t, b = setup.train_seconds, setup.broadcast_seconds
    least = capacity.mu_min(kappa=kappa, t_train=t, t_bcast=b, rollouts_per_step=setup.R)
    target = capacity.mu_target(least, setup.gamma) or setup.gamma * setup.R / t
    cover = rent(setup, target)
    counts = Counter(int(offer.peer.partition("/")[0]) for offer in cover.chosen)
    rented = [(_rented(setup, index, counts[index]), setup.classes[index].mu) for index in sorted(counts)]
    slowest, slowest_mu = max(rented, key=lambda each: each[0].lease_seconds)
    nodes = counts.total()
    supply = Supply(
        nodes=nodes,
        node_rate=cover.mu / nodes,
        train_seconds=t,
        broadcast_seconds=b,
        price_node_hour=cover.price / MICRO / nodes,
        price_learner_hour=setup.learner_price / MICRO,
        lease_rate=slowest_mu,
    )
    plan = Plan(S=S, kappa=kappa, R=setup.R, n=setup.n, steps=setup.steps, slice_samples=1, lease_seconds=math.inf)
    found = forecast(plan, supply)
    hour = (cover.price + setup.learner_price) / MICRO
    return Row(
        S=S,
        kappa=kappa,
        mu_min=least,
        mu_target=target,
        mu_pool=cover.mu,
        enough=cover.reached and least is not None,
        nodes=nodes,
        rented=tuple(kind for kind, _ in rented),
        dollars_hour=hour,
        dollars_hour_pool=cover.price / MICRO,
        dollars_step=hour * found.step_seconds / 3600,
        step_seconds=found.step_seconds,
        bound_by=found.bound_by,
        bubble=found.bubble,
        staleness_bound=found.staleness_bound,
        staleness=found.staleness,
        lease_samples=slowest.lease_samples,
        lease_seconds=slowest.lease_seconds,
        feasible=found.feasible,
        advice=_advice(setup, kappa, cover, target, least, found),
        dollars=found.dollars if setup.steps > 1 else None,
        seconds=found.seconds if setup.steps > 1 else None,
    )


def _rented(setup: Setup, index: int, count: int) -> Rented:
    each = setup.classes[index]
    samples = capacity.lease_samples_max(mu=each.mu, t_train=setup.train_seconds, samples_unmeasured=setup.n)
    return Rented(each.name, count, each.count, samples, samples / each.mu)


def _advice(
    setup: Setup, kappa: int, cover: Cover, target: float, least: float | None, found: Forecast
) -> tuple[str, ...]:
    """Which number to change, where something does not fit."""
    t, b = setup.train_seconds, setup.broadcast_seconds
    said: list[str] = []
    if least is None:
        enough = math.floor(b / t + KAPPA_SLACK) + 1
        said.append(
            f"no pool keeps the learner busy: T_bcast = {b:g} s takes all of kappa T_train = {kappa * t:g} s; "
            f"kappa = {enough} (S = {enough + 1}) would do, or a broadcast below {kappa * t:g} s"
        )
    if not cover.reached:
        best = min(setup.classes, key=lambda each: (each.price / each.mu, -each.mu))
        more = math.ceil((target - cover.mu) / best.mu - KAPPA_SLACK)
        most = math.floor(setup.R * cover.mu / target / setup.n) * setup.n
        smaller = f", or R = {most}" if most else ""
        said.append(f"all nodes offered make {cover.mu:.3g} of {target:.3g} a second: {more} more {best.name}{smaller}")
    return (*said, *found.advice)


def _fits(kappa: int | None, staleness_max: int) -> bool:
    return kappa is None or kappa <= staleness_max + 1
