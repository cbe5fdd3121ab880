"""The objective of DESIGN section 10, on flat vectors with one element a sampled token. Pure, torch.

Per token, with w = min(pi_learner,old / pi_sampler, C) held constant:

    J = w * [ min(rho A, clip(rho, 1 - low, 1 + high) A) - beta * KL(pi_theta || pi_ref) ]
    rho = pi_theta / pi_learner,old

pi_learner,old are the weights at the start of the step, evaluated once. w corrects for a sampler that is older, or
quantised; rho bounds what the step's own updates may do. KL to the reference is the k3 estimate
exp(d) - 1 - d with d = log pi_ref - log pi_theta: never negative, and unbiased on tokens of pi_theta.

The loss of an update is -(s J) summed over its tokens, with the scale s that `token_scales` gives a token. TRL calls
the choices `loss_type`:

| aggregation | s of a token of response i                 | TRL 1.16                                               |
|-------------|--------------------------------------------|--------------------------------------------------------|
| token       | 1 / (tokens of the update)                 | bnpo, were its local batch the update; dapo, with one  |
|             |                                            | update a step (with more it divides by their mean)     |
| sequence    | 1 / (responses of the update x tokens of i)| grpo                                                   |
| constant    | 1 / (responses of the update x constant)   | dr_grpo, constant = max_completion_length              |

TRL puts the KL beside w, and by default times rho (`use_bias_correction_kl`); here it is under w, as in the paper.
Of the three "token" is the default: every token weighs the same, so a long response weighs more than a short one. A
mean per response first makes each token of a long wrong answer cheap; the constant has neither bias, and the size of a
gradient then goes with the length of the responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .config import RATIO_CAP_MAX

if TYPE_CHECKING:
    from torch import Tensor

    from .config import Aggregation, ObjectiveSettings

LOG_RATIO_MAX = 20.0
"""Bound on a log-ratio inside an estimate that is only shown: e^20 is already "these are two different models"."""

RATIO_EXPLODED = RATIO_CAP_MAX
"""A token whose unclipped w rho is above this stops its update: one token would outweigh a whole minibatch. It is the
largest C that may be set, and honest updates stay below 10."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective's constants: clip range, C (None: no truncation), beta, and how tokens are averaged."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = 2.0
    kl_weight: float = 0.0
    aggregation: Aggregation = "token"
    aggregation_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LossParts:
    """What a part of an update is made of; the counts are int64 tensors without dimension, so that nothing waits here.

    `loss_sum` is differentiable: minus the sum of s J. `clipped_low` and `clipped_high` count the tokens whose rho was
    bounded from below and from above, `bad` those that must stop the update (`bad_tokens`).
    """

    loss_sum: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    bad: Tensor

    @property
    def clipped(self) -> int:
        """Tokens whose rho was clipped, on either side."""
        return int(self.clipped_low + self.clipped_high)


def objective_of(settings: ObjectiveSettings) -> Objective:
    """The constants that `[objective]` of learner.toml sets."""
    return Objective(
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        ratio_cap=settings.cap,
        kl_weight=settings.kl_weight,
        aggregation=settings.aggregation,
        aggregation_tokens=settings.aggregation_tokens,
    )


def importance_weights(old: Tensor, sampler: Tensor, ratio_cap: float | None) -> Tensor:
    """min(pi_learner,old / pi_sampler, C) [N]. The logarithm is what is bounded, so nothing overflows before it.

    Without C (None) the ratio itself, which may be infinite; `bad_tokens` then finds it.
    """
    ratio = old - sampler
    return ratio.exp() if ratio_cap is None else ratio.clamp(max=math.log(ratio_cap)).exp()


def token_scales(lengths: Tensor, objective: Objective, dtype: torch.dtype = torch.float32) -> Tensor:
    """s of each response's tokens [B], from the numbers of sampled tokens [B] of all the responses of one update."""
    count = max(1, len(lengths))
    match objective.aggregation:
        case "token":
            divisors = lengths.sum().expand(len(lengths))
        case "sequence":
            divisors = count * lengths
        case "constant":
            assert objective.aggregation_tokens is not None  # the settings saw to it
            divisors = torch.full_like(lengths, count * objective.aggregation_tokens)
    return 1.0 / divisors.clamp(min=1).to(dtype)


def grpo_loss(
    logprobs: Tensor,
    old: Tensor,
    weights: Tensor,
    advantages: Tensor,
    objective: Objective,
    reference: Tensor | None = None,
    scales: Tensor | None = None,
) -> LossParts:
    """Minus the sum of s J over the tokens; everything is [N].

    Only `logprobs` (log pi_theta) carries a gradient. `weights` comes from `importance_weights`; `reference` (log
    pi_ref) is needed when `kl_weight` is not 0; `scales` is s a token, by `token_scales` (1 when left out).
    """
    ratio = (logprobs - old).exp()
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if objective.kl_weight and reference is not None:
        surrogate = surrogate - objective.kl_weight * k3(reference - logprobs)
    values = weights * surrogate
    with torch.no_grad():
        clipped_low = (advantages < 0) & (ratio < low)
        clipped_high = (advantages > 0) & (ratio > high)
        exploded = (weights * ratio > RATIO_EXPLODED) & ~(clipped_low | clipped_high)
        # Each by itself: hidden from the value by the clip or an advantage of 0, it spoils the gradient all the same.
        finite = values.isfinite() & ratio.isfinite() & logprobs.isfinite() & old.isfinite() & weights.isfinite()
        bad = exploded | ~finite
    return LossParts(
        loss_sum=-(values if scales is None else values * scales).sum(),
        clipped_low=clipped_low.sum(),
        clipped_high=clipped_high.sum(),
        bad=bad.sum(),
    )


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - 1 - d, d = log(p / q) on tokens drawn from q: an estimate of KL(q || p) that is never negative."""
    return log_ratio.exp() - 1.0 - log_ratio


def kl_estimate(old: Tensor, sampler: Tensor) -> Tensor:
    """k3 of KL(pi_sampler || pi_learner,old) per token [N]: how far the sampler is off. For showing only."""
    return k3((old - sampler).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)).clamp(min=0.0)
