"""What generates tokens, as the node's services see it: orders in, rollouts out.

Two implementations under one suite (`tests/contract/test_engine.py`): `process_engine.ProcessEngine`, which supervises
llama.cpp in a process of its own, and `fake_engine.FakeEngine`, which costs virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from echo2.p2p.errors import Echo2Error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from echo2.p2p.messages import RolloutRecord, Sampling


class EngineError(Echo2Error):
    """Base of what an engine raises on purpose."""


class EngineFailed(EngineError):
    """The engine died or hung again and again. The same orders may be tried later; the message says what happened."""


class SnapshotRefused(EngineError):
    """The engine cannot load this snapshot. The one loaded before is still in use."""


class OrderRefused(EngineError):
    """An order that this engine cannot run (it does not fit the context or the memory). Trying again is useless."""


@dataclass(frozen=True, slots=True)
class SliceOrder:
    """Samples sample_first .. sample_first + sample_count - 1 of one prompt; `prompt_tokens` is raw int32.

    `drawn`: tokens already drawn of these samples, in earlier turns that the prompt holds: u_t goes on from there.
    """

    seed: bytes
    sample_first: int
    sample_count: int
    prompt_tokens: bytes
    sampling: Sampling
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA adapter to put on a snapshot; the caller has verified its bytes against `sha256`."""

    path: Path
    sha256: bytes


@dataclass(frozen=True, slots=True)
class SliceResult:
    """The rollouts of one order, in order of sample."""

    rollouts: tuple[RolloutRecord, ...]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the machine's owner gives the engine. `cache_mib` bounds the key-value cache; gpu_layers -1 = all.

    `plain_kernels`: without llama.cpp's special CPU buffers (AMX, repacked weights), which some virtual machines claim
    to support and then do not allow.
    """

    threads: int = 1
    sequences: int = 256
    cache_mib: int = 512
    gpu_layers: int = -1
    plain_kernels: bool = False


class Engine(Protocol):
    """One policy in memory. Its methods are for one task at a time."""

    async def load(self, path: Path, snapshot_sha256: bytes, adapter: AdapterFile | None = None) -> None:
        """Use the snapshot at `path`, whose bytes the caller has verified against `snapshot_sha256`, with its adapter.

        Another adapter on the snapshot in use costs what the adapter's size costs: the snapshot is not loaded again.
        Raises SnapshotRefused (what is in use stays in use) or EngineFailed.
        """

    async def generate(self, slices: Sequence[SliceOrder]) -> list[SliceResult]:
        """One result an order, in their order; the same orders give the same tokens, up to numerics.

        Raises OrderRefused (none was run) or EngineFailed.
        """

    async def close(self) -> None:
        """Let go of memory and processes. Never raises; safe to call twice; nothing may be asked afterwards."""
