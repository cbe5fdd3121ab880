"""Advantages of GRPO: how much better a response was than those it is compared with. Pure, numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

EPSILON = 1e-6
"""Added to the standard deviation: keeps a group whose rewards differ by almost nothing from exploding."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """One value a rollout, in the order given, and how many groups taught nothing."""

    values: NDArray[np.float64]
    groups_without_spread: int


def labelled_advantages(
    rewards: NDArray[np.float64],
    labels: NDArray[np.int64],
    *,
    divide_by_std: bool = True,
    epsilon: float = EPSILON,
) -> Advantages:
    """A_i = (r_i - mean) / (std + epsilon) among the rollouts of one label; without `divide_by_std`, r_i - mean.

    `std` is the population's (divided by n; TRL divides by n - 1 and adds 1e-4). A group whose rewards are all equal,
    and so a group of one, gets exact zeros: neither rounding in the mean nor epsilon may turn "nothing to learn" into a
    gradient. `rewards` and `labels` are [B]; which labels there are is `batch.group_labels`.
    """
    values = np.zeros(len(rewards))
    flat = 0
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        group = rewards[rows]
        if group.min() == group.max():
            flat += 1
            continue
        centred = group - group.mean()
        values[rows] = centred / (group.std() + epsilon) if divide_by_std else centred
    return Advantages(values, flat)


def group_advantages(
    rewards: Sequence[Sequence[float]], *, divide_by_std: bool = True, epsilon: float = EPSILON
) -> Advantages:
    """`labelled_advantages` of rewards given group by group; an empty group is one without spread."""
    flat = np.asarray([reward for group in rewards for reward in group], dtype=np.float64)
    labels = np.repeat(np.arange(len(rewards)), [len(group) for group in rewards])
    found = labelled_advantages(flat, labels, divide_by_std=divide_by_std, epsilon=epsilon)
    empty = sum(not len(group) for group in rewards)
    return Advantages(found.values, found.groups_without_spread + empty)
