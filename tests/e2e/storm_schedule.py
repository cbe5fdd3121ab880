"""When a kill storm strikes what: drawn from a seeded rng before the run begins, in moments that a slow machine keeps.

A moment is a phase of the run and how far into it. In training that is a step, so that a loaded machine is struck at
the same places as a quiet one; before and after it is a share of what the phase takes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

START, TRAINING, CHECKPOINT, END, FINISHING = "start", "training", "checkpoint", "end", "finishing"

SHARES = {START: 0.4, TRAINING: 0.35, CHECKPOINT: 0.05, END: 0.05, FINISHING: 0.15}
"""Of a run's duration, about: 12 s on a quiet machine until the baseline is measured, 12 s of steps, 1 s until the
result is, 4 s until the nodes have handed in what they have. A checkpoint takes some hundredths of a second and has
more than its share: there the learner is struck while it writes."""

PHASE_SECONDS = {START: 12.0, END: 0.7, FINISHING: 3.5}

NODES_MIN, NODES_MAX = 2, 3

KILLS_MIN, KILLS_MAX = 4, 8
"""Of one run: fewer would mostly pay for starting, more would leave it little time to do anything between them."""

TWO_AT_ONCE = 0.2
AGAIN = 0.2
"""Shares of the strikes that hit another process at the same moment, or the same one again while it restarts."""

AGAIN_SECONDS_MAX = 5.0
"""From the second start: libraries load, the state is restored, the first hello goes out."""

RESTART_SECONDS_MAX = 1.5


@dataclass(frozen=True)
class Strike:
    """`targets` are killed at once; `again` is how long after its restart the first one is killed once more."""

    phase: str
    part: float
    targets: tuple[str, ...]
    again: float | None = None

    def __str__(self) -> str:
        more = "" if self.again is None else f", again {self.again:.2f} s after its restart"
        return f"{self.phase} {self.part:.3f}: {' + '.join(self.targets)}{more}"


@dataclass(frozen=True)
class Plan:
    """One run of the storm."""

    seed: int
    run: int
    nodes: int
    strikes: tuple[Strike, ...]

    @property
    def kills(self) -> int:
        return sum(len(strike.targets) + (strike.again is not None) for strike in self.strikes)


def names_of(nodes: int) -> list[str]:
    return [f"node-{number}" for number in range(1, nodes + 1)]


def targets_of(nodes: int, rng: random.Random) -> list[str]:
    """Every kind of process: coordinator, learner, each node, the engine of one node, the scorer."""
    names = names_of(nodes)
    return ["coordinator", "learner", *names, f"{rng.choice(names)}/engine", "coordinator/scorer"]


def plan_run(seed: int, run: int, kills_max: int) -> Plan:
    """The plan of run number `run`: the same whatever came before it, so that one run can be repeated alone."""
    rng = random.Random(f"{seed}:{run}")
    nodes = rng.randint(NODES_MIN, NODES_MAX)
    strikes: list[Strike] = []
    left = min(rng.randint(KILLS_MIN, KILLS_MAX), kills_max)
    while left > 0:
        phase = rng.choices(list(SHARES), list(SHARES.values()))[0]
        targets = rng.sample(targets_of(nodes, rng), 2 if rng.random() < TWO_AT_ONCE and left > 1 else 1)
        if phase == CHECKPOINT:
            targets = ["learner", *(target for target in targets[1:] if target != "learner")]
        left -= len(targets)
        again = rng.uniform(0, AGAIN_SECONDS_MAX) if rng.random() < AGAIN and left > 0 else None
        left -= again is not None
        strikes.append(Strike(phase, rng.random(), tuple(targets), again))
    order = list(SHARES)
    return Plan(seed, run, nodes, tuple(sorted(strikes, key=lambda each: (order.index(each.phase), each.part))))


def kind_of(target: str) -> str:
    """For counting: nodes and engines are alike."""
    name = target.rpartition("/")[2]
    return "node" if name.startswith("node-") else name
