"""Advantages of GRPO: how much better a response was than its siblings of the same prompt. Pure, numpy."""

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


def group_advantages(
    rewards: Sequence[Sequence[float]], *, divide_by_std: bool = True, epsilon: float = EPSILON
) -> Advantages:
    """A_i = (r_i - mean) / (std + epsilon) within each group; without `divide_by_std`, r_i - mean.

    `std` is the population's (divided by n). A group whose rewards are all equal, and so a group of one, gets exact
    zeros: neither rounding in the mean nor epsilon may turn "nothing to learn" into a gradient.
    """
    parts: list[NDArray[np.float64]] = []
    flat = 0
    for group in rewards:
        values = np.asarray(group, dtype=np.float64)
        if values.size == 0 or values.min() == values.max():
            parts.append(np.zeros_like(values))
            flat += 1
            continue
        centred = values - values.mean()
        parts.append(centred / (values.std() + epsilon) if divide_by_std else centred)
    return Advantages(np.concatenate(parts) if parts else np.zeros(0), flat)
