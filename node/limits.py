"""How much to ask for, and how long to wait. Pure: time and randomness are arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

FIRST_BATCH_SAMPLES = 16
"""Before anything is measured: one group of the usual size."""

LEASE_SHARE = 0.25
"""Of a lease's duration that one batch may take. A lease waits for the batch before its own, then for its own, then is
sent: with a quarter each, half the duration is left for surprises."""

RATE_WEIGHT = 0.3
"""Weight of the newest batch in the measured rate: follows a machine that gets busy within a few batches."""

BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MOST_SECONDS = 30.0
"""A coordinator that is back after a long night is found within half a minute, and not stormed by all at once."""


def batch_samples(
    samples_per_second: float | None, *, batch_seconds: float, lease_seconds: float | None, samples_max: int
) -> int:
    """Samples that make one batch: what this machine generates in `batch_seconds`, or in its share of a lease.

    On a slow machine one sample alone can take longer than `batch_seconds`. Asking for one would keep it slow: many
    side by side cost little more than one, so a full first batch is asked for while it fits its share of the lease.
    """
    if samples_per_second is None:
        return min(FIRST_BATCH_SAMPLES, samples_max)
    wanted = max(int(samples_per_second * batch_seconds), FIRST_BATCH_SAMPLES)
    if lease_seconds is not None:
        wanted = min(wanted, int(samples_per_second * LEASE_SHARE * lease_seconds))
    return max(1, min(wanted, samples_max))


class Rate:
    """A measured rate: a moving mean over batches, None before the first."""

    def __init__(self) -> None:
        self.per_second: float | None = None

    def measured(self, count: float, seconds: float) -> None:
        """`count` were done in `seconds`."""
        now = count / max(seconds, 1e-6)
        old = now if self.per_second is None else self.per_second
        self.per_second = old + RATE_WEIGHT * (now - old)


class Backoff:
    """Growing pauses with jitter, so that nodes cut off together do not come back together."""

    def __init__(
        self, rng: random.Random, *, first: float = BACKOFF_FIRST_SECONDS, most: float = BACKOFF_MOST_SECONDS
    ) -> None:
        self._rng = rng
        self._first = first
        self._most = most
        self._failures = 0

    def next(self, at_least: float | None = None) -> float:
        """Seconds to pause after one more failure; not below what the peer asked for."""
        ceiling = min(self._first * 2.0 ** min(self._failures, 32), self._most)
        self._failures += 1
        pause = ceiling * (0.5 + 0.5 * self._rng.random())
        return pause if at_least is None else at_least + pause * 0.5

    def reset(self) -> None:
        """It worked."""
        self._failures = 0
