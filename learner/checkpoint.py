"""Checkpoints on disk: a folder each, whole or not there. Weights are safetensors, the rest is JSON: nothing runs code.

    e000001-v00000004/      epoch 1, version 4
        weights.safetensors optimizer.safetensors    (the generator's state is a tensor beside the optimiser's)
        progress.json       where the run stands, and size and SHA-256 of the two: written last

Made under a name that ends in .partial, every file and the folder synced, then renamed, then the parent synced. A
folder counts only when its progress.json reads and the files are what it says: a half-written or damaged one is passed
over for the next older.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import Finished, StepMetrics

from .interfaces import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
PROGRESS_FILE = "progress.json"
PARTIAL_SUFFIX = ".partial"
FORMAT = 1

HASH_BYTES = 1 << 20

_NAME = re.compile(r"e(\d{6,})-v(\d{8,})")

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run in `folder`; the `kept` newest stay."""

    def __init__(self, folder: Path, *, kept: int) -> None:
        self._folder = folder
        self._kept = kept

    def save(self, progress: Progress, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """One more checkpoint, durable when this returns. Raises OSError; those of before are untouched."""
        self._folder.mkdir(parents=True, exist_ok=True)
        final = self.path(progress.epoch, progress.version)
        if _read(final) != progress:  # else an earlier attempt failed only after its rename
            self._write(final, progress, {WEIGHTS_FILE: weights, OPTIMIZER_FILE: optimizer})
        _sync_folder(self._folder)
        for epoch, version in self._names()[: -self._kept]:
            shutil.rmtree(self.path(epoch, version), ignore_errors=True)

    def restore(self) -> tuple[Progress, Path] | None:
        """The newest complete checkpoint and its folder; None when none was ever finished.

        Its epoch is raised to the highest that any folder's name shows: a damaged one's may have been published. Raises
        ConfigurationError when all are damaged: starting over from the base model is for a person to decide.
        """
        names = self._names()
        for epoch, version in sorted(names, reverse=True):
            folder = self.path(epoch, version)
            progress = _read(folder)
            if progress is not None and (progress.epoch, progress.version) == (epoch, version):
                return replace(progress, epoch=max(epoch for epoch, _ in names)), folder
            log.warning("the checkpoint %s is damaged and is passed over", folder)
        if names:
            raise ConfigurationError(
                f"every checkpoint in {self._folder} is damaged; put a good one back, or move the folder away to start "
                "over from the base model"
            )
        return None

    def path(self, epoch: int, version: int) -> Path:
        """The folder of one checkpoint."""
        return self._folder / f"e{epoch:06d}-v{version:08d}"

    def _names(self) -> list[tuple[int, int]]:
        if not self._folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    def _write(self, final: Path, progress: Progress, contents: Mapping[str, Mapping[str, Tensor]]) -> None:
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        for leftover in (*self._folder.glob(f"*{PARTIAL_SUFFIX}"), final):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        files = {}
        for name, tensors in contents.items():
            try:
                save_file(dict(tensors), partial / name)
            except SafetensorError as error:  # how safetensors reports a full disk
                raise OSError(f"cannot write {partial / name}: {error}") from error
            _sync_file(partial / name)
            files[name] = _fingerprint(partial / name)
        (partial / PROGRESS_FILE).write_text(json.dumps(_to_json(progress, files)) + "\n", encoding="utf-8")
        _sync_file(partial / PROGRESS_FILE)
        _sync_folder(partial)
        partial.rename(final)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's weights by parameter name. Raises OSError."""
    return _load(folder / WEIGHTS_FILE)


def load_optimizer(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's optimiser state, flat. Raises OSError."""
    return _load(folder / OPTIMIZER_FILE)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise OSError(f"cannot read {path}: {error}") from error


def _read(folder: Path) -> Progress | None:
    """The progress in a checkpoint folder, None unless everything in it is whole."""
    try:
        value = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
        progress = _from_json(value)
        fingerprints = {name: _fingerprint(folder / name) for name in (WEIGHTS_FILE, OPTIMIZER_FILE)}
    except (OSError, ValueError, KeyError, TypeError):  # pydantic's ValidationError is a ValueError
        return None
    return progress if value["files"] == fingerprints else None


def _to_json(progress: Progress, files: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "run": progress.run,
        "epoch": progress.epoch,
        "version": progress.version,
        "consumed": [[first, stop, f"{mask:x}"] for first, stop, mask in progress.consumed],
        "finished": [[e.lease_id.hex(), e.sample, e.state, e.step, e.reason] for e in progress.finished],
        "recent": [[e.lease_id.hex(), e.sample, e.step] for e in progress.recent],
        "steps": [metrics.model_dump() for metrics in progress.steps],
        "files": files,
    }


def _from_json(value: Any) -> Progress:
    if value["format"] != FORMAT:
        raise ValueError(f"a checkpoint of format {value['format']}, this version reads {FORMAT}")
    return Progress(
        run=value["run"],
        epoch=value["epoch"],
        version=value["version"],
        consumed=tuple((first, stop, int(mask, 16)) for first, stop, mask in value["consumed"]),
        finished=tuple(
            Finished(lease_id=bytes.fromhex(lease), sample=sample, state=state, step=step, reason=reason)
            for lease, sample, state, step, reason in value["finished"]
        ),
        steps=tuple(StepMetrics.model_validate(metrics) for metrics in value["steps"]),
        recent=tuple(
            Finished(lease_id=bytes.fromhex(lease), sample=sample, state="consumed", step=step, reason="")
            for lease, sample, step in value.get("recent", ())  # absent from checkpoints of the first releases
        ),
    )


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if os.name != "posix":  # Windows cannot open a folder, and needs no sync of one
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
