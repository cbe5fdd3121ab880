"""Which training prompt a training ordinal means: a fresh permutation of the whole set for each pass.

A pure function of its arguments, so any process can resume at any ordinal, and no restart skips or repeats a prompt.
Nothing is stored: the permutation is a Feistel network over the next power of four, walked until it lands inside.
"""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 6
"""Four make a Feistel network a good permutation; two more because the halves here are only a few bits wide."""


def train_index(seed: int, ordinal: int, size: int) -> int:
    """The training prompt of group `ordinal`, 0 <= index < size.

    Ordinals k * size ... (k + 1) * size - 1 are pass k and visit every index exactly once. Raises ValueError for a
    negative ordinal or an empty set.
    """
    if size < 1 or ordinal < 0:
        raise ValueError(f"no training prompt {ordinal} of {size}")
    sweep, position = divmod(ordinal, size)
    key = blake2b(f"{seed}/{sweep}".encode(), digest_size=32).digest()
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:  # the domain is under four times the size (four when the size is 1): a few turns on average
        position = _permute(key, position, half_bits)
        if position < size:
            return position


def _permute(key: bytes, value: int, half_bits: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(_ROUNDS):
        word = blake2b(turn.to_bytes(1, "little") + right.to_bytes(8, "little"), key=key, digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(word, "little") & mask)
    return left << half_bits | right
