"""The checks a slice must pass before its rollouts are held (DESIGN section 9). Pure.

In this order, each with the reason the node is told; size and schema were checked by `p2p.codec`, reward and audit come
after. The first failing rollout rejects its whole slice: slices are all or nothing.

| code         | the slice is refused when                                                                   |
|--------------|---------------------------------------------------------------------------------------------|
| lease        | there is no such lease, or it is another node's                                             |
| (duplicate)  | terminal `duplicate`, not a rejection: decided by `leases.LeaseBook.judge`                  |
| (late)       | terminal `stale`: the group is closed or the version too old; also decided there            |
| incomplete   | its rollouts are not exactly the lease's samples, in order                                  |
| manifest     | it was generated with another snapshot than the lease names                                 |
| size         | tokens or log-probabilities are ragged, empty, of different counts, or above tokens_max     |
| prompt       | prompt and response together do not fit the model's context                                 |
| token_range  | a token id is negative or not below the vocabulary's size                                   |
| termination  | it does not end with a stop id or at tokens_max, as `finish` says; or a stop id comes before |
| spans        | in place of termination for several turns: they are not turns as ordered (`tasks.episode`)  |
| logprobs     | a log-probability is not finite or above 0; or that of an inserted token is not 0           |

Of several turns, whether the environment answered so is found out later, by playing it again (`replay`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from echo2.tasks.episode import Claim, fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from echo2.p2p.messages import RolloutRecord, Slice
    from echo2.tasks.episode import EpisodeRules

    from .records import RolloutEntry

Code = Literal["lease", "incomplete", "manifest", "size", "prompt", "token_range", "termination", "spans", "logprobs"]

LOGPROB_TOLERANCE = 1e-3
"""A log-softmax in float32 may come out a few units of the last place above 0; a real violation is far above it."""

ITEM_BYTES = 4
"""int32 tokens, float32 log-probabilities."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a slice is refused. `code` is stable and counted; `detail` is for the node's owner."""

    code: Code
    detail: str

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


@dataclass(frozen=True, slots=True)
class SliceRules:
    """What the lease ordered."""

    samples: range
    manifest_hash: bytes
    prompt_tokens: int
    tokens_max: int
    stop_ids: tuple[int, ...]
    vocabulary_size: int
    context_tokens: int
    episode: EpisodeRules | None = None
    """Of several turns; None for one."""


def check_owner(lease_peer: str | None, peer: str) -> Rejection | None:
    """The lease check: it exists (its peer is not None) and is `peer`'s."""
    if lease_peer is None:
        return Rejection("lease", "no such lease was given by this coordinator")
    if lease_peer != peer:
        return Rejection("lease", "the lease was given to another node")
    return None


def check_slice(received: Slice, rules: SliceRules) -> Rejection | None:
    """The first check of the table, from `incomplete` on, that the slice fails."""
    rollouts = received.rollouts
    if [rollout.sample for rollout in rollouts] != list(rules.samples):
        first, last = rules.samples[0], rules.samples[-1]
        return Rejection("incomplete", f"samples {first} to {last} were ordered, in this order and no others")
    if received.manifest_hash != rules.manifest_hash:
        return Rejection("manifest", "the slice was generated with another snapshot than its lease names")
    for rollout in rollouts:
        fault = _check_size(rollout.sample, rollout.tokens, rollout.logprobs, rules)
        if fault is not None:
            return fault
    tokens = np.frombuffer(b"".join(rollout.tokens for rollout in rollouts), dtype="<i4")
    logprobs = np.frombuffer(b"".join(rollout.logprobs for rollout in rollouts), dtype="<f4")
    ends = np.cumsum([len(rollout.tokens) // ITEM_BYTES for rollout in rollouts])
    return (
        _check_range(tokens, rules)
        or (_check_termination(received, tokens, ends, rules) if rules.episode is None else None)
        or _check_spans(received, rules.episode)
        or _check_logprobs(logprobs)
    )


def _check_size(sample: int, tokens: bytes, logprobs: bytes, rules: SliceRules) -> Rejection | None:
    if len(tokens) % ITEM_BYTES or len(logprobs) % ITEM_BYTES:
        return Rejection("size", f"sample {sample}: tokens and log-probabilities come in fours of bytes")
    count = len(tokens) // ITEM_BYTES
    if not count:
        return Rejection("size", f"sample {sample} has no tokens: the terminal one belongs to the response")
    if len(logprobs) != len(tokens):
        return Rejection("size", f"sample {sample}: {count} tokens, {len(logprobs) // ITEM_BYTES} log-probabilities")
    if count > rules.tokens_max:
        return Rejection("size", f"sample {sample}: {count} tokens, at most {rules.tokens_max} were ordered")
    if rules.prompt_tokens + count > rules.context_tokens:
        return Rejection(
            "prompt",
            f"sample {sample}: {rules.prompt_tokens} + {count} tokens do not fit a context of {rules.context_tokens}",
        )
    return None


def _check_range(tokens: NDArray[np.int32], rules: SliceRules) -> Rejection | None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= rules.vocabulary_size:
        bad = low if low < 0 else high
        return Rejection("token_range", f"token {bad} is not below the vocabulary's {rules.vocabulary_size}")
    return None


def _check_termination(
    received: Slice, tokens: NDArray[np.int32], ends: NDArray[np.int64], rules: SliceRules
) -> Rejection | None:
    is_stop = np.zeros(len(tokens), dtype=bool)
    for stop_id in rules.stop_ids:
        is_stop |= tokens == stop_id
    start = 0
    for rollout, end in zip(received.rollouts, ends.tolist(), strict=True):
        stopped, full = bool(is_stop[end - 1]), end - start == rules.tokens_max
        if rollout.finish == "stop" and not stopped:
            return Rejection("termination", f"sample {rollout.sample} says stop but does not end with a stop token")
        if rollout.finish == "length" and (stopped or not full):
            return Rejection(
                "termination",
                f"sample {rollout.sample} says length but has {end - start} of {rules.tokens_max} tokens"
                + (" and ends with a stop token" if stopped else ""),
            )
        start = end
    if int(is_stop.sum()) != int(is_stop[ends - 1].sum()):
        return Rejection("termination", "a stop token comes before the end of a response")
    return None


def _check_spans(received: Slice, rules: EpisodeRules | None) -> Rejection | None:
    for rollout in received.rollouts:
        if rules is None:
            if rollout.spans or rollout.reward is not None:
                return Rejection("spans", f"sample {rollout.sample} has spans or a reward, in a task of one turn")
            continue
        if found := fault(claim_of(rollout), rules):
            return Rejection("spans", f"sample {rollout.sample}: {found}")
        if rollout.reward is None:
            return Rejection("spans", f"sample {rollout.sample} has no reward of the node's own sandbox")
        if rollout.spans:
            inserted = np.repeat(np.arange(len(rollout.spans)) % 2 == 1, rollout.spans)
            if np.frombuffer(rollout.logprobs, dtype="<f4")[inserted].any():
                return Rejection("logprobs", f"sample {rollout.sample}: an inserted token has a log-probability")
    return None


def claim_of(rollout: RolloutRecord | RolloutEntry) -> Claim:
    """A rollout's tokens, spans and end, as `tasks.episode` judges them."""
    tokens = np.frombuffer(rollout.tokens, dtype="<i4")
    return Claim(tuple(tokens.tolist()), rollout.spans, rollout.finish)


def _check_logprobs(logprobs: NDArray[np.float32]) -> Rejection | None:
    if not np.isfinite(logprobs).all():
        return Rejection("logprobs", "a log-probability is not a finite number")
    highest = float(logprobs.max())
    if highest > LOGPROB_TOLERANCE:
        return Rejection("logprobs", f"a log-probability of {highest:.4g} is above 0")
    return None
