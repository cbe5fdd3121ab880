"""What a run will take before it begins: time, price, staleness, and which number to change (DESIGN section 7). Pure.

Let t = T_train, b = T_bcast, l = L, r = R' / mu_pool the seconds the pool needs for one step's rollouts, and D the
depth that pacing allows (`capacity.pacing_depth`). In the long run a publish period, kappa steps, takes as long as the
slowest of the three loops that it closes:

| loop             | seconds of one publish period                                                            |
|------------------|------------------------------------------------------------------------------------------|
| the learner      | kappa t                                                                                  |
| the pool         | kappa r                                                                                  |
| both in turn     | (b + l + max(K r + t, r + K t)) / m, with m = floor((D + 1) / kappa), K = kappa (m + 1) - D - 1 |

The last: version x allows the rollouts of steps up to x + D, and version x + kappa m can be published once step
x + kappa m - 1 is trained. Those allowed before x cover all of its steps but K; these must be generated and trained
after x has reached the nodes, one after the other. Synchronous (S = 0, kappa = 1): m = K = 1, b + l + r + t a step.

R' = R + the held-out answers of one step: what evaluations under way cost, at most `eval_share` of the pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from . import capacity


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers of a run that decide what it takes. `heldout` prompts; the others as `config.RunConfig` has them."""

    S: int
    kappa: int
    R: int
    n: int
    steps: int
    slice_samples: int
    lease_seconds: float
    heldout: int = 0
    eval_every: int = 0
    eval_samples: int = 1
    eval_share: float = 0.1


@dataclass(frozen=True, slots=True)
class Supply:
    """What it will run on: `node_rate` is mu_i, accepted rollouts per second of one node. Prices are per hour.

    In a pool of several kinds `node_rate` is the mean, and `lease_rate` mu_i of the node whose leases take longest.
    """

    nodes: int
    node_rate: float
    train_seconds: float
    broadcast_seconds: float
    price_node_hour: float | None = None
    price_learner_hour: float | None = None
    lease_rate: float | None = None

    @property
    def mu_pool(self) -> float:
        """Rollouts per second of all nodes."""
        return self.nodes * self.node_rate


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is to be expected; see the module's text. `dollars` is None without prices."""

    seconds: float
    step_seconds: float
    bound_by: str
    bubble: float
    dollars: float | None
    dollars_learner: float | None
    mu_pool: float
    mu_min: float | None
    mu_target: float | None
    nodes_needed: int | None
    overlap: bool
    lease_samples: int
    lease_seconds: float
    staleness_bound: int | None
    staleness: int
    feasible: bool
    eval_answers: int
    eval_answered: int
    advice: tuple[str, ...] = field(default=())


def forecast(plan: Plan, supply: Supply) -> Forecast:
    """All of it. Rates and seconds are above 0, T_bcast may be 0."""
    t, b, mu = supply.train_seconds, supply.broadcast_seconds, supply.mu_pool
    rate = supply.lease_rate or supply.node_rate
    samples = capacity.lease_samples_max(mu=rate, t_train=t, samples_unmeasured=plan.n)
    lease = samples / rate
    bound = capacity.staleness_estimate(
        kappa=plan.kappa, t_train=t, t_bcast=b, lease_seconds=lease, rollouts_per_step=plan.R, mu_pool=mu
    )
    depth = capacity.pacing_depth(staleness_max=plan.S, kappa=plan.kappa, estimate=bound)
    period, bound_by = publish_period(plan, supply, lease_seconds=lease, depth=depth)
    step = period / plan.kappa
    ends = 2 * (b + plan.heldout * plan.eval_samples / mu)
    seconds = ends + plan.R / mu + plan.steps * step
    hours = seconds / 3600
    learner = None if supply.price_learner_hour is None else hours * supply.price_learner_hour
    pool = None if supply.price_node_hour is None else hours * supply.nodes * supply.price_node_hour
    least = capacity.mu_min(kappa=plan.kappa, t_train=t, t_bcast=b, rollouts_per_step=plan.R)
    target = capacity.mu_target(least)
    answers, answered = evaluation(plan, supply, step)
    fits = capacity.feasible(
        staleness_max=plan.S, kappa=plan.kappa, t_train=t, t_bcast=b, lease_seconds=lease, rollouts_per_step=plan.R,
        mu_pool=mu,
    )  # fmt: skip
    return Forecast(
        seconds=seconds,
        step_seconds=step,
        bound_by=bound_by,
        bubble=max(0.0, 1 - t / step),
        dollars=None if pool is None or learner is None else pool + learner,
        dollars_learner=learner,
        mu_pool=mu,
        mu_min=least,
        mu_target=target,
        nodes_needed=None if target is None else math.ceil(target / supply.node_rate - 1e-9),
        overlap=capacity.overlap_holds(kappa=plan.kappa, t_train=t, t_bcast=b, rollouts_per_step=plan.R, mu_pool=mu),
        lease_samples=samples,
        lease_seconds=lease,
        staleness_bound=bound,
        staleness=plan.S if bound is None else min(plan.S, bound),
        feasible=fits,
        eval_answers=answers,
        eval_answered=answered,
        advice=() if fits else advice(plan, supply, lease),
    )


def publish_period(plan: Plan, supply: Supply, *, lease_seconds: float, depth: int) -> tuple[float, str]:
    """Seconds from one publish to the next in the long run, and which loop decides it."""
    t, b, kappa = supply.train_seconds, supply.broadcast_seconds, plan.kappa
    plain = plan.R / supply.mu_pool
    r = plain + min(_answers_per_step(plan) / supply.mu_pool, plain * plan.eval_share / (1 - plan.eval_share))
    ahead = (depth + 1) // kappa
    serial = kappa * (ahead + 1) - depth - 1
    loops = {
        "the learner": kappa * t,
        "the pool": kappa * r,
        "both in turn": (b + lease_seconds + max(serial * r + t, r + serial * t)) / ahead,
    }
    slowest = max(loops, key=lambda name: loops[name])
    return loops[slowest], slowest


def evaluation(plan: Plan, supply: Supply, step_seconds: float) -> tuple[int, int]:
    """Answers that one evaluation under way wants, and how many of them come before the pool moves on.

    It has one publish period: what the pool has to spare, and its share of what it has not.
    """
    if not plan.eval_every:
        return 0, 0
    wanted = plan.heldout * plan.eval_samples
    made = plan.kappa * step_seconds * supply.mu_pool
    share = plan.kappa * plan.R * plan.eval_share / (1 - plan.eval_share)
    return wanted, min(wanted, math.floor(max(made - plan.kappa * plan.R, share) + 1e-9))


def advice(plan: Plan, supply: Supply, lease_seconds: float) -> tuple[str, ...]:
    """What alone would make T_bcast + L + R / mu_pool <= (S - kappa + 1) T_train true; several ways where there are."""
    t, b, r = supply.train_seconds, supply.broadcast_seconds, plan.R / supply.mu_pool
    needed = math.ceil((b + lease_seconds + r) / t - 1e-9)
    said = [f"S = {plan.kappa - 1 + needed}, with kappa = {plan.kappa} as it is"]
    if plan.S + 1 - needed >= 1:
        said.append(f"kappa = {plan.S + 1 - needed}: snapshots come more often")
    room = (plan.S - plan.kappa + 1) * t - b - lease_seconds
    if room > 0:
        said.append(f"{math.ceil(plan.R / (room * supply.node_rate) - 1e-9)} nodes instead of {supply.nodes}")
    if lease_seconds > capacity.lease_seconds_max(t) * (1 + 1e-9):  # samples / mu, and mu from samples
        said.append("shorter responses (tokens_max): one alone takes a node longer than half a step")
    if b > t:
        said.append("a faster broadcast: fewer bytes a snapshot, or more uplink at the learner")
    return tuple(said)


def _answers_per_step(plan: Plan) -> float:
    if not plan.eval_every:
        return 0.0
    published = -(-plan.eval_every // plan.kappa) * plan.kappa  # only published versions can be evaluated
    return plan.heldout * plan.eval_samples / published
