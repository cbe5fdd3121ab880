"""An engine that costs virtual time instead of computing: simulations and the services' tests run on it.

It keeps the contract of `engine.Engine` (`tests/contract/test_engine.py`), is deterministic, and can be told to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import trio

from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.messages import RolloutRecord

from .engine import AdapterFile, EngineError, EngineFailed, OrderRefused, SliceOrder, SliceResult, SnapshotRefused
from .sampling import uniform

if TYPE_CHECKING:
    from pathlib import Path

Tokens = Callable[[SliceOrder, int], Sequence[int]]
"""(order, sample) -> the tokens drawn, the terminal one included; cut at tokens_max."""


def seeded_tokens(order: SliceOrder, sample: int) -> Sequence[int]:
    """The default: up to tokens_max of ten symbols by u_t, a stop token with probability 1/4 at each place."""
    tokens: list[int] = []
    stop_ids = order.sampling.stop_ids
    symbols = [token for token in range(10 + len(stop_ids)) if token not in stop_ids]
    for t in range(order.sampling.tokens_max):
        u = uniform(order.seed, sample, order.drawn + t)
        if stop_ids and u < 0.25:
            return [*tokens, stop_ids[0]]
        tokens.append(symbols[int(u * 10)])
    return tokens


class FakeEngine:
    """Costs `load_seconds` a load, and `batch_seconds` + `rollout_seconds` a rollout a batch.

    Faults, for tests: hashes in `refused` cannot be loaded; `failures` counts down EngineFailed raised by `generate`.
    """

    def __init__(
        self,
        *,
        rollout_seconds: float = 0.01,
        batch_seconds: float = 0.0,
        load_seconds: float = 0.1,
        tokens: Tokens = seeded_tokens,
        sequence_tokens_max: int = 1 << 20,
    ) -> None:
        self.rollout_seconds = rollout_seconds
        self.batch_seconds = batch_seconds
        self.load_seconds = load_seconds
        self.refused: set[bytes] = set()
        self.failures = 0
        self.loaded: bytes | None = None
        self.base: bytes | None = None
        self.loads = 0
        self.generated = 0
        self._tokens = tokens
        self._sequence_tokens_max = sequence_tokens_max

    async def load(self, path: Path, snapshot_sha256: bytes, adapter: AdapterFile | None = None) -> None:
        """See `engine.Engine.load`. No file is read; another adapter on the same snapshot costs no time."""
        await trio.sleep(0 if adapter is not None and snapshot_sha256 == self.base else self.load_seconds)
        for name, sha256 in [(path.name, snapshot_sha256)] + ([(adapter.path.name, adapter.sha256)] if adapter else []):
            if sha256 in self.refused:
                raise SnapshotRefused(f"{name} cannot be loaded")
        self.base = snapshot_sha256
        self.loaded = adapter.sha256 if adapter is not None else snapshot_sha256
        self.loads += 1

    async def generate(self, slices: Sequence[SliceOrder]) -> list[SliceResult]:
        """See `engine.Engine.generate`."""
        if self.loaded is None:
            raise EngineError("no snapshot is loaded")
        for order in slices:
            if len(order.prompt_tokens) // 4 + order.sampling.tokens_max > self._sequence_tokens_max:
                raise OrderRefused(f"prompt and response need more than {self._sequence_tokens_max} tokens")
        await trio.sleep(self.batch_seconds + self.rollout_seconds * sum(order.sample_count for order in slices))
        if self.failures:
            self.failures -= 1
            raise EngineFailed("the engine process was killed by signal 9")
        results = [self._slice(order) for order in slices]
        self.generated += sum(len(result.rollouts) for result in results)
        return results

    async def close(self) -> None:
        """See `engine.Engine.close`."""
        self.loaded = None
        await trio.lowlevel.checkpoint()

    def _slice(self, order: SliceOrder) -> SliceResult:
        return SliceResult(
            tuple(
                self._rollout(order, sample)
                for sample in range(order.sample_first, order.sample_first + order.sample_count)
            )
        )

    def _rollout(self, order: SliceOrder, sample: int) -> RolloutRecord:
        tokens = list(self._tokens(order, sample))[: order.sampling.tokens_max]
        stopped = bool(tokens) and tokens[-1] in order.sampling.stop_ids
        return RolloutRecord(
            sample=sample,
            tokens=pack_tokens(tokens),
            logprobs=pack_logprobs(np.full(len(tokens), -1.0)),
            finish="stop" if stopped else "length",
        )
