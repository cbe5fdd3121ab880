"""Which rollouts stop an update: a number that is not finite, or a ratio that has exploded. Pure, numpy.

Run only when `loss.grpo_loss` has counted a bad token (`LossParts.bad`) or the loss is not finite; the same criterion,
told apart by its cause. An update without a culprit here is one whose gradient alone is not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .loss import RATIO_EXPLODED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .loss import Objective


def find_culprits(
    *,
    rows: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    old: NDArray[np.float32],
    weights: NDArray[np.float32],
    advantages: NDArray[np.float32],
    objective: Objective,
    reference: NDArray[np.float32] | None = None,
) -> tuple[tuple[int, str], ...]:
    """(row, reason) of each rollout with a bad token, in the order of the rows; the first cause that applies is told.

    All are [N], one element a sampled token; `rows` says of which rollout it is, `logprobs` is log pi_theta.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp(logprobs - old)
        clipped = ((advantages < 0) & (ratio < 1 - objective.clip_low)) | (
            (advantages > 0) & (ratio > 1 + objective.clip_high)
        )
        exploded = (weights * ratio > RATIO_EXPLODED) & ~clipped
        away = np.zeros(len(rows))
        if reference is not None and objective.kl_weight:
            away = np.exp(reference - logprobs) - (reference - logprobs)
    causes = (
        ("the policy gives one of its tokens no finite log-probability", ~np.isfinite(logprobs) | ~np.isfinite(old)),
        ("its advantage is not finite: the rewards of its group are too large", ~np.isfinite(advantages)),
        (
            f"the policy's probability of a token is over {RATIO_EXPLODED:g} times what its node reported",
            ~np.isfinite(weights) | (exploded & (weights > RATIO_EXPLODED)),
        ),
        (f"the step has made a token over {RATIO_EXPLODED:g} times as likely", ~np.isfinite(ratio) | exploded),
        ("the reference's probability of a token is out of all proportion", ~np.isfinite(away)),
    )
    told: dict[int, str] = {}
    for reason, bad in causes:
        for row in np.unique(rows[bad]):
            told.setdefault(int(row), reason)
    return tuple(sorted(told.items()))
