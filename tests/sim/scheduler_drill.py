"""The drill of the scheduler: a random pool settles, a third of it leaves, and what comes of that is measured."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.scheduler_world import LOOK_SECONDS, World

from echo2.coordinator.activation_records import Rules
from echo2.coordinator.selection import Offer, mu_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PERIODS_BEFORE = 40
PERIODS_AFTER = 12
PERIODS_HELD = 30
"""After the loss, in a whole drill: long enough for the holds of those called in to end, and for what follows."""


def settled(seed: int, **options: Any) -> World:
    """A world after forty periods."""
    world = World(seed, **options)
    world.run(PERIODS_BEFORE * world.rules.period_seconds)
    return world


def random_pool(seed: int, noise: float = 0.2, nocost: bool = False) -> World:
    """Two to forty nodes, some in probation, of rates and warm-ups that differ as they like; after forty periods."""
    rng = random.Random(f"pool {seed}")
    nodes = round(math.exp(rng.uniform(math.log(1.6), math.log(40.4))))  # as many small ones as large ones
    return settled(
        seed,
        nodes=nodes,
        noise=noise,
        supply=rng.uniform(1.2, 5.0),
        spread=rng.uniform(0.2, 0.9),
        free_share=rng.choice((0.0, 0.0, 0.2)),
        install_seconds=(5.0, 45.0),
        probation_share=rng.uniform(0.0, 0.3),
        probation_seconds=(PERIODS_BEFORE + PERIODS_HELD) * 60.0,
        rules=Rules(nocost_seed=seed if nocost else None),
    )


def periods_until_back(world: World, series: Sequence[tuple[float, float]], since: float) -> float:
    """From `since` until mu_pool, which fell below mu_min, is above it again, in periods; 0 where it never fell."""
    period = world.rules.period_seconds
    after = [(at, mu) for at, mu in series if since < at <= since + PERIODS_AFTER * period]
    low = next((at for at, mu in after if mu < world.mu_min), None)
    if low is None:
        return 0.0
    back = next((at for at, mu in after if at > low and mu >= world.mu_min), math.inf)
    return (back - since) / period


def share_below(world: World, since: float, until: float = math.inf) -> float:
    """Of the time after `since`, how much the true mu_pool is below mu_min."""
    after = [mu for at, mu in world.true_mu if since < at <= until]
    return sum(mu < world.mu_min for mu in after) / len(after)


def lose_a_third(world: World, *, at_least: int = 0, periods_after: float = PERIODS_AFTER) -> float:
    """When: at any moment within a period."""
    world.run(2 * world.rng.randrange(30))
    left_at = world.now
    world.leave(1 / 3, at_least=at_least)
    world.run(periods_after * world.rules.period_seconds)
    return left_at


@dataclass(frozen=True)
class Drill:
    """What came of one. Times in periods, costs over the optimum for mu_target with the truth known."""

    nodes: int
    worked: int
    rest: float
    """What all that are left, and out of probation, can make, over mu_min."""
    said: bool
    """Whether a decision says that it is impossible: one since the loss, or the last one before."""
    back: float
    all_on: float
    """Until all that are left work."""
    below_before: float
    below_after: float
    """Of the time from three periods after the loss on."""
    minds_noise: int
    """Most changes of a node within ten periods, before the loss."""
    minds: int
    """The same over the whole, without those called back: released before the loss, and needed after it."""
    recalled: int
    """How many were."""
    cost_before: float
    cost_after: float

    @property
    def possible(self) -> bool:
        """Whether they make mu_min."""
        return self.rest >= 1


def drill(world: World) -> Drill:
    """A third of a settled pool leaves, at least one node of those that work."""
    period, target = world.rules.period_seconds, world.rules.gamma * world.mu_min
    worked = len(world.state.assigned)
    minds_noise, cost_before = world.changes_within(10), over(world, target)
    below_before = share_below(world, 2 * period)
    world.run(2 * world.rng.randrange(30))
    left_at = world.now
    world.leave(1 / 3, at_least=1)
    said = "impossible" in world.state.standing.values()
    left = {each.peer for each in world.usable()}
    rest = sum(each.mu for each in world.usable()) / world.mu_min
    all_on = math.inf
    for tick in range(1, 30 * PERIODS_HELD + 1):
        world.run(period / 30)
        if all_on == math.inf and left <= set(world.state.assigned):
            all_on = tick / 30
    recalled = called_back(world, left_at)
    return Drill(
        nodes=world.nodes,
        worked=worked,
        rest=rest,
        said=said or any(made.cause == "impossible" for made in world.decisions if made.at > left_at),
        back=periods_until_back(world, world.true_mu, left_at),
        all_on=all_on,
        below_before=below_before,
        below_after=share_below(world, left_at + 3 * period),
        minds_noise=minds_noise,
        minds=world.changes_within(10, without=recalled),
        recalled=len(recalled),
        cost_before=cost_before,
        cost_after=over(world, target),
    )


def called_back(world: World, left_at: float) -> set[tuple[str, float]]:
    """Who was activated again within ten periods, and when, though released: only because nodes were lost since."""
    hold = world.rules.hold_periods * world.rules.period_seconds
    released: dict[str, float] = {}
    found = set()
    for made in world.decisions:
        for peer in made.chosen:
            if made.action == "release":
                released[peer] = made.at
            elif released.get(peer, made.at) <= left_at < made.at < released[peer] + hold:
                found.add((peer, made.at))
    return found


def churned(seed: int, nodes: int, periods: int = 60) -> tuple[float, float]:
    """Each node is away once in half an hour, for 40 to 600 s: cost over the optimum, and time below mu_min, means."""
    world = settled(seed, nodes=nodes, noise=0.2)
    began, period, away, costs = world.now, world.rules.period_seconds, dict[str, float](), []
    while world.now < began + periods * period:
        for peer, machine in world.machines.items():
            if machine.alive and world.rng.random() < LOOK_SECONDS / 1800:
                machine.alive, away[peer] = False, world.now + world.rng.uniform(40, 600)
            elif away.get(peer, math.inf) <= world.now:
                machine.alive, machine.ready_at = True, world.now + machine.install_seconds
                del away[peer]
        world.run(LOOK_SECONDS)
        if world.now % period == 0:
            costs.append(over(world, world.rules.gamma * world.mu_min))
    return statistics.mean(costs), share_below(world, began)


def over(world: World, target: float) -> float:
    """What works costs over the optimum; 0 where free nodes suffice, and everything where only all of them do."""
    best = world.optimum(target)
    return world.price() / best - 1 if best else 0.0


def random_offers(rng: random.Random, size: int = 12) -> list[Offer]:
    """Rates that differ several-fold and prices that do not follow them: what the internet offers."""
    return [Offer(f"n{i}", rng.lognormvariate(0.0, 0.6), round(rng.uniform(0.05, 0.8) * 1e6)) for i in range(size)]


def target_of(rng: random.Random, offers: Sequence[Offer]) -> float:
    """From a fifth to nine tenths of all."""
    return rng.uniform(0.2, 0.9) * mu_of(offers)


def brute_force(offers: Sequence[Offer], target: float) -> int | None:
    """The price of the best of all subsets."""
    rates, prices = [0.0] * (1 << len(offers)), [0] * (1 << len(offers))
    best = None
    for subset in range(1, 1 << len(offers)):
        bit = (subset & -subset).bit_length() - 1
        rest = subset & (subset - 1)
        rates[subset], prices[subset] = rates[rest] + offers[bit].mu, prices[rest] + offers[bit].price
        if rates[subset] >= target * (1 - 1e-9) and (best is None or prices[subset] < best):
            best = prices[subset]
    return best
