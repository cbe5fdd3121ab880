"""The objective of DESIGN section 10, on flat vectors with one element a sampled token. Pure, torch.

Per token, with w = min(pi_learner,old / pi_sampler, C) held constant:

    J = w * [ min(rho A, clip(rho, 1 - low, 1 + high) A) - beta * KL(pi_theta || pi_ref) ]
    rho = pi_theta / pi_learner,old

pi_learner,old are the weights at the start of the step, evaluated once. w corrects for a sampler that is older, or
quantised; rho bounds what the step's own updates may do. KL to the reference is the k3 estimate
exp(d) - 1 - d with d = log pi_ref - log pi_theta: never negative, and unbiased on tokens of pi_theta.

The loss is -J averaged over the minibatch's sampled tokens (token-mean): every token weighs the same, so a long
response weighs more than a short one. A mean per response first would make each token of a long wrong answer cheap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_MAX = 20.0
"""Bound on a log-ratio inside an estimate that is only shown: e^20 is already "these are two different models"."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective's constants: clip range, C, beta."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 2.0
    kl_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class LossParts:
    """`loss_sum` is differentiable: minus the sum of J. `clipped` is the number of tokens whose rho was clipped."""

    loss_sum: Tensor
    clipped: int


def importance_weights(old: Tensor, sampler: Tensor, ratio_cap: float) -> Tensor:
    """min(pi_learner,old / pi_sampler, C) [N]. The logarithm is what is bounded, so nothing overflows before it."""
    return (old - sampler).clamp(max=math.log(ratio_cap)).exp()


def grpo_loss(
    logprobs: Tensor,
    old: Tensor,
    weights: Tensor,
    advantages: Tensor,
    objective: Objective,
    reference: Tensor | None = None,
) -> LossParts:
    """Minus the sum of J over the tokens; everything is [N].

    Only `logprobs` (log pi_theta) carries a gradient. `weights` comes from `importance_weights`; `reference` (log
    pi_ref) is needed when `kl_weight` is not 0.
    """
    ratio = (logprobs - old).exp()
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if objective.kl_weight and reference is not None:
        surrogate = surrogate - objective.kl_weight * k3(reference - logprobs)
    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return LossParts(loss_sum=-(weights * surrogate).sum(), clipped=int(clipped.sum()))


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - 1 - d, d = log(p / q) on tokens drawn from q: an estimate of KL(q || p) that is never negative."""
    return log_ratio.exp() - 1.0 - log_ratio


def kl_estimate(old: Tensor, sampler: Tensor) -> Tensor:
    """k3 of KL(pi_sampler || pi_learner,old) per token [N]: how far the sampler is off. For showing only."""
    return k3((old - sampler).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)).clamp(min=0.0)
