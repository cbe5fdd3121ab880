"""Rollouts -> the arrays a training step works on. Pure, numpy.

Rows are prompt then response, padded on the right. Under causal attention padding on the right changes nothing to its
left, so no attention mask is needed and positions count from 0 as they did in the sampler. Tokens and log-probabilities
come as the sampler drew them, never decoded and encoded again (DESIGN section 10: token in, token out).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from echo2.p2p.codec import unpack_logprobs, unpack_tokens
from echo2.p2p.errors import SchemaViolation

from .advantage import labelled_advantages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from echo2.p2p.messages import AdmittedRollout

    from .config import Grouping
    from .interfaces import Batch

LOGPROB_TOLERANCE = 1e-3
"""How far above 0 rounding may bring a log-probability: the coordinator's bound."""

PAD = 0
"""Never sampled, never scored, never attended to from a real token: any id of the vocabulary does."""


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """B rollouts of at most T tokens. `mask` is 1 on sampled tokens only: not on prompts, templates or padding.

    tokens int64 [B, T]; mask bool [B, T]; sampler_logprobs float32 [B, T] (0 where not sampled); advantages and
    temperature float32 [B]; group int64 [B], the rollout's place among the batch's groups; nodes: peer id a rollout;
    keys: its lease id and sample. `groups_without_spread` counts groups as the advantages were computed in.
    """

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    sampler_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    temperature: NDArray[np.float32]
    group: NDArray[np.int64]
    nodes: tuple[str, ...]
    keys: tuple[tuple[bytes, int], ...]
    groups_without_spread: int


def collate(batch: Batch, *, grouping: Grouping = "prompt", divide_by_std: bool = True) -> BatchArrays:
    """The arrays of a batch, group after group. Raises SchemaViolation for a rollout `fault` finds fault with."""
    rollouts = batch.rollouts
    prompts = [unpack_tokens(rollout.prompt_tokens) for rollout in rollouts]
    responses = [unpack_tokens(rollout.tokens) for rollout in rollouts]
    shape = len(rollouts), max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    tokens = np.full(shape, PAD, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    logprobs = np.zeros(shape, dtype=np.float32)
    for row, (prompt, response, rollout) in enumerate(zip(prompts, responses, rollouts, strict=True)):
        first, stop = len(prompt), len(prompt) + len(response)
        tokens[row, :first] = prompt
        tokens[row, first:stop] = response
        mask[row, first:stop] = sampled(rollout, len(response))
        logprobs[row, first:stop] = unpack_logprobs(rollout.logprobs)
    rewards = np.asarray([rollout.reward for rollout in rollouts], dtype=np.float64)
    advantages = labelled_advantages(rewards, group_labels(batch, grouping), divide_by_std=divide_by_std)
    with np.errstate(over="ignore"):  # an absurd reward becomes infinite, and its update is left out by name
        narrow = advantages.values.astype(np.float32)
    return BatchArrays(
        tokens=tokens,
        mask=mask,
        sampler_logprobs=logprobs,
        advantages=narrow,
        temperature=np.asarray([rollout.temperature for rollout in rollouts], dtype=np.float32),
        group=np.repeat(np.arange(len(batch.groups)), [len(group.rollouts) for group in batch.groups]),
        nodes=tuple(rollout.peer for rollout in rollouts),
        keys=tuple((rollout.lease_id, rollout.sample) for rollout in rollouts),
        groups_without_spread=advantages.groups_without_spread,
    )


def sampled(rollout: AdmittedRollout, length: int) -> NDArray[np.bool_]:
    """Which of the `length` tokens after the prompt the policy drew; only those carry loss, ratio, KL and entropy.

    `spans` of several turns say it: lengths of what was drawn, what was inserted, what was drawn, ...
    """
    if not rollout.spans:
        return np.ones(length, dtype=np.bool_)
    return np.repeat(np.arange(len(rollout.spans)) % 2 == 0, rollout.spans)


def group_labels(batch: Batch, grouping: Grouping) -> NDArray[np.int64]:
    """Among which rollouts each one's reward is compared: those with the same label [B].

    - prompt: its own group, the n samples of one place in the curriculum;
    - initial_state: all rollouts of the batch that began with the same prompt tokens, whatever group they are of. In a
      sandbox several seeds may deal the same first observation, and a curriculum comes round;
    - batch: all of them.
    """
    rollouts = batch.rollouts
    match grouping:
        case "prompt":
            return np.repeat(np.arange(len(batch.groups)), [len(group.rollouts) for group in batch.groups])
        case "initial_state":
            places: dict[bytes, int] = {}
            return np.asarray([places.setdefault(rollout.prompt_tokens, len(places)) for rollout in rollouts])
        case "batch":
            return np.zeros(len(rollouts), dtype=np.int64)


def fault(rollout: AdmittedRollout, *, vocabulary_size: int, context_tokens: int) -> str | None:
    """Why this rollout cannot be trained on; None when it can.

    The coordinator has checked all this. It is checked again because here a bad token id ends the process, and the same
    rollout would end the next one.
    """
    try:
        prompt, response = unpack_tokens(rollout.prompt_tokens), unpack_tokens(rollout.tokens)
        logprobs = unpack_logprobs(rollout.logprobs)
    except SchemaViolation as error:
        return str(error)
    if not len(prompt) or not len(response):
        return "an empty prompt or response"
    if len(response) != len(logprobs):
        return f"{len(response)} tokens with {len(logprobs)} log-probabilities"
    if logprobs.max() > LOGPROB_TOLERANCE:
        return f"a log-probability of {float(logprobs.max()):.4g}"
    if rollout.spans and (sum(rollout.spans) != len(response) or len(rollout.spans) % 2 == 0):
        return f"spans of {sum(rollout.spans)} tokens for {len(response)}"
    if min(rollout.spans[::2], default=1) < 1 or min(rollout.spans[1::2], default=0) < 0:
        return f"spans {rollout.spans[:8]} with a turn in which nothing was drawn"
    if len(prompt) + len(response) > context_tokens:
        return f"{len(prompt) + len(response)} tokens in a context of {context_tokens}"
    if any(ids.min() < 0 or ids.max() >= vocabulary_size for ids in (prompt, response)):
        return f"a token id outside the vocabulary of {vocabulary_size}"
    return None


def split_groups(arrays: BatchArrays, parts: int, order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Row numbers of each minibatch: whole groups, dealt in `order` (a permutation of the groups), sizes within one.

    With fewer groups than `parts` the rows themselves are dealt, so that a step keeps its number of updates.
    """
    groups = len(order)
    if groups < parts:
        rows = np.arange(len(arrays.group))
        return [rows[part::parts] for part in range(parts) if part < len(rows)]
    return [np.flatnonzero(np.isin(arrays.group, chosen)) for chosen in np.array_split(order, parts)]
