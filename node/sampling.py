"""How a token is drawn (DESIGN section 9). Pure numpy: given the seed the response is determined, up to numerics.

u_t = the top 53 bits of BLAKE2b(key = seed, le64(sample) || le64(t)), divided by 2^53. The digest is BLAKE2b's full 64
bytes and "top" reads it as one big-endian number: so the first 8 bytes, big-endian, shifted right by 11. The token is
where u_t falls in the cumulative distribution, in vocabulary order, in float64. Filters apply in the order
temperature, top-k, top-p, min-p. The log-probability is log softmax(logits / T), before the filters.

Rules of the edges, the same everywhere because an audit replays them:
- top-k keeps exactly k tokens; of equal logits the lower id comes first.
- top-p acts on what top-k left, renormalised: in order of falling probability (equal ones by id) a token is kept while
  the mass before it is below p. The likeliest token is always kept.
- min-p keeps a token whose probability is at least min_p times the largest.
- A token of zero mass is never drawn, however near to 0 or 1 u is.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from echo2.p2p.messages import Sampling

_COUNTERS = struct.Struct("<QQ")
_TOP = struct.Struct(">Q")
_SCALE = 2.0**-53


def uniform(seed: bytes, sample: int, t: int) -> float:
    """u_t in [0, 1) of one sample: `t` counts sampled tokens over all turns, from 0."""
    digest = hashlib.blake2b(_COUNTERS.pack(sample, t), key=seed).digest()
    return float((_TOP.unpack_from(digest)[0] >> 11) * _SCALE)


def keyed(seed: bytes) -> hashlib.blake2b:
    """The hash with the seed already absorbed: the costly half of `uniform`, shared by all tokens of a group."""
    return hashlib.blake2b(key=seed)


def uniforms(states: Sequence[hashlib.blake2b], samples: Iterable[int], steps: Iterable[int]) -> NDArray[np.float64]:
    """`uniform` of many: states[i] = keyed(seed of i). Shape (len(states),)."""
    tops = np.empty(len(states), dtype=np.uint64)
    for row, (state, sample, t) in enumerate(zip(states, samples, steps, strict=True)):
        copy = state.copy()
        copy.update(_COUNTERS.pack(sample, t))
        (tops[row],) = _TOP.unpack_from(copy.digest())
    scaled: NDArray[np.float64] = (tops >> np.uint64(11)).astype(np.float64) * _SCALE
    return scaled


def draw(
    logits: NDArray[np.float32], u: NDArray[np.float64], sampling: Sampling
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """One token for each row of `logits` (rows, vocabulary) and its log-probability.

    Raises ValueError when a row has no finite maximum (NaN or an infinity): the model or the engine is broken.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    with np.errstate(invalid="ignore"):  # inf - inf, refused in the next line
        scaled -= scaled.max(axis=1, keepdims=True)
    if np.isnan(scaled).any():
        raise ValueError("the model produced logits that are not finite")
    mass = np.exp(scaled)
    log_total = np.log(mass.sum(axis=1))
    mass = _filtered(scaled, mass, sampling)

    cumulative = np.cumsum(mass, axis=1)
    target = u * cumulative[:, -1]
    # The first index whose cumulative mass is above the target: never a token of zero mass, as that adds nothing.
    tokens = (cumulative <= target[:, None]).sum(axis=1)
    # u near 1 times the total can round up to the total; then the draw is the last token that has mass.
    last = mass.shape[1] - 1 - np.argmax(mass[:, ::-1] > 0, axis=1)
    tokens = np.minimum(tokens, last).astype(np.int32)
    logprobs = np.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0] - log_total
    return tokens, logprobs.astype(np.float32)


def _filtered(scaled: NDArray[np.float64], mass: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    vocabulary = scaled.shape[1]
    by_k = 0 < sampling.top_k < vocabulary
    if by_k or sampling.top_p < 1.0:
        order = np.argsort(-scaled, axis=1, kind="stable")
        sorted_mass = np.take_along_axis(mass, order, axis=1)
        if by_k:
            sorted_mass[:, sampling.top_k :] = 0.0
        if sampling.top_p < 1.0:
            before = np.cumsum(sorted_mass, axis=1)
            bound = sampling.top_p * before[:, -1:]
            before -= sorted_mass
            before[:, 0] = 0.0
            sorted_mass[before >= bound] = 0.0
        mass = np.zeros_like(mass)
        np.put_along_axis(mass, order, sorted_mass, axis=1)
    if sampling.min_p > 0.0:
        mass = np.where(mass >= sampling.min_p * mass.max(axis=1, keepdims=True), mass, 0.0)
    return mass
