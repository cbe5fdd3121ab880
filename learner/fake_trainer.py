"""A trainer without weights, for virtual time: what a step costs is `trio.sleep`, what it keeps survives a crash.

`FakeDisk` outlives the trainer, as a disk outlives a killed process: give it to the next `FakeTrainer`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from .advantage import group_advantages
from .interfaces import Progress, TrainStats

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .interfaces import Batch


@dataclass
class FakeDisk:
    """Checkpoints by (epoch, version), and every batch that was ever trained, in order."""

    checkpoints: dict[tuple[int, int], Progress] = field(default_factory=dict)
    trained: list[Batch] = field(default_factory=list)
    broken: OSError | None = None


class FakeTrainer:
    """Implements `interfaces.Trainer`. `write` makes a snapshot's bytes a file or a name the store understands."""

    def __init__(
        self,
        *,
        disk: FakeDisk,
        write: Callable[[str, bytes], Path],
        train_seconds: float = 1.0,
        save_seconds: float = 0.1,
        export_seconds: float = 0.1,
        snapshot_bytes: int = 4096,
        on_train: Callable[[Batch], None] | None = None,
    ) -> None:
        self._disk = disk
        self._write = write
        self._train_seconds = train_seconds
        self._save_seconds = save_seconds
        self._export_seconds = export_seconds
        self._snapshot_bytes = snapshot_bytes
        self._on_train = on_train

    async def train(self, batch: Batch) -> TrainStats:
        """Costs `train_seconds`."""
        await trio.sleep(self._train_seconds)
        self._disk.trained.append(batch)
        if self._on_train is not None:
            self._on_train(batch)
        advantages = group_advantages([[rollout.reward for rollout in group.rollouts] for group in batch.groups])
        return TrainStats(
            loss=0.0,
            ratio_mean=1.0,
            clip_share=0.0,
            kl_sampler_learner=0.0,
            entropy=1.0,
            gradient_norm=1.0,
            groups_without_spread=advantages.groups_without_spread,
            updates=2,
        )

    async def save(self, progress: Progress) -> None:
        """Durable after `save_seconds`; cancelled before, nothing was kept."""
        await trio.sleep(self._save_seconds)
        if self._disk.broken is not None:
            raise self._disk.broken
        self._disk.checkpoints[progress.epoch, progress.version] = progress

    async def restore(self) -> Progress | None:
        """The highest (epoch, version) that was saved."""
        await trio.lowlevel.checkpoint()
        if not self._disk.checkpoints:
            return None
        return self._disk.checkpoints[max(self._disk.checkpoints)]

    async def export(self, epoch: int, version: int, *, adapter: bool = False) -> Path:
        """Bytes that depend on the version alone. Raises KeyError for a checkpoint that was never saved."""
        await trio.sleep(self._export_seconds)
        progress = self._disk.checkpoints[epoch, version]
        block = hashlib.sha256(f"{progress.run} {version}{' adapter' if adapter else ''}".encode()).digest()
        size = self._snapshot_bytes // (4 if adapter else 1)
        data = (block * (size // len(block) + 1))[:size]
        return self._write(f"{progress.run}-{epoch}-{version}.gguf", data)
