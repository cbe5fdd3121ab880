"""What a training step measured: from its arrays and its updates to one `TrainStats`. Pure, numpy.

Everything is over sampled tokens. The k3 estimate of KL(q || p) on tokens of q is exp(d) - 1 - d, d = log p - log q.
A number that is not finite is shown as 0: the update that it spoilt is named in `updates_skipped`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from echo2.p2p.messages import CULPRITS_MAX, Culprit

from .interfaces import TrainStats
from .loss import LOG_RATIO_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .batch import BatchArrays


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """One optimiser update, or one left out: then `fault` says why, and `culprits` name row and reason."""

    loss: float = 0.0
    tokens: int = 0
    clipped_low: int = 0
    clipped_high: int = 0
    gradient_norm: float = 0.0
    fault: str | None = None
    culprits: tuple[tuple[int, str], ...] = ()


def step_stats(
    arrays: BatchArrays,
    *,
    old: NDArray[np.float32],
    entropy: NDArray[np.float32],
    reference: NDArray[np.float32] | None,
    ratio_cap: float | None,
    updates: Sequence[UpdateResult],
) -> TrainStats:
    """The numbers of one step. `old`, `entropy` and `reference` are [B, T], evaluated before its first update."""
    mask = arrays.mask
    learner = old[mask].astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity less infinity: shown as 0
        log_ratio = learner - arrays.sampler_logprobs[mask]
        away = None if reference is None else reference[mask] - learner
    cap = math.inf if ratio_cap is None else math.log(ratio_cap)
    weights = np.exp(np.minimum(log_ratio, min(cap, LOG_RATIO_MAX)))
    kl = _k3(log_ratio)
    kl_by_node, tokens_by_node = _by_node(arrays, kl)
    done = [update for update in updates if update.fault is None]
    tokens = max(1, sum(update.tokens for update in done))
    low, high = sum(update.clipped_low for update in done), sum(update.clipped_high for update in done)
    return TrainStats(
        loss=_mean([update.loss for update in done]),
        ratio_mean=_shown(weights.mean()),
        ratio_max=_shown(np.exp(min(log_ratio.max(), LOG_RATIO_MAX))),
        truncated_share=float(np.mean(log_ratio > cap)),
        clip_share=(low + high) / tokens,
        clip_share_low=low / tokens,
        clip_share_high=high / tokens,
        kl_sampler_learner=_shown(kl.mean()),
        kl_reference=None if away is None else _shown(_k3(away).mean()),
        entropy=_shown(entropy[mask].mean(dtype=np.float64)),
        gradient_norm=_mean([update.gradient_norm for update in done]),
        groups_without_spread=arrays.groups_without_spread,
        updates=len(done),
        updates_skipped=tuple(update.fault for update in updates if update.fault is not None),
        kl_by_node=kl_by_node,
        tokens_by_node=tokens_by_node,
        culprits=_name(arrays, updates),
    )


def _k3(log_ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    bounded = np.clip(log_ratio, -LOG_RATIO_MAX, LOG_RATIO_MAX)
    return np.maximum(np.expm1(bounded) - bounded, 0.0)


def _by_node(arrays: BatchArrays, kl: NDArray[np.float64]) -> tuple[dict[str, float], dict[str, int]]:
    """Mean k3 KL of the sampler to the learner over each node's tokens, and how many tokens that is."""
    names, node = np.unique(np.asarray(arrays.nodes), return_inverse=True)
    of_token = np.broadcast_to(node[:, None], arrays.mask.shape)[arrays.mask]
    sums = np.bincount(of_token, weights=kl, minlength=len(names))
    counts = np.bincount(of_token, minlength=len(names))
    means = {str(name): _shown(total / count) for name, total, count in zip(names, sums, counts, strict=True) if count}
    return means, {str(name): int(count) for name, count in zip(names, counts, strict=True)}


def _name(arrays: BatchArrays, updates: Sequence[UpdateResult]) -> tuple[Culprit, ...]:
    """The culprits of the updates left out, as the coordinator knows them; the first ones, when they are many."""
    named = [
        Culprit(lease_id=arrays.keys[row][0], sample=arrays.keys[row][1], peer=arrays.nodes[row], reason=reason)
        for update in updates
        for row, reason in update.culprits
    ]
    return tuple(named[:CULPRITS_MAX])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _shown(value: float | np.floating) -> float:
    return float(value) if math.isfinite(value) else 0.0
