"""Checkpoints on disk: a folder each, whole or not there. Weights are safetensors, the rest is JSON: nothing runs code.

    e000001-v00000004/      epoch 1, version 4
        weights.safetensors optimizer.safetensors    (the generator's state is a tensor beside the optimiser's)
        progress.json       where the run stands, size and SHA-256 of the two, and a SHA-256 of all that: written last

Made under a name that ends in .partial, every file and the folder synced, then renamed, then the parent synced. A
folder counts only when its progress.json reads and it and the files are what it says: a half-written or damaged one is
passed over for the next older.

Format 1, of the first releases, had no SHA-256 of progress.json itself. It is read, with a word in the log: the save
that follows every start is of format 2, so one is taken on trust once.

A learner of several processes keeps the same files: whole tensors, gathered and written one at a time by its first
process. So a run goes on with any number of processes, a snapshot is made from the files without stopping the others,
and equal weights are equal bytes. (torch.distributed.checkpoint would write all shards at once; but its metadata is a
pickle, which runs code, and only the processes that wrote them could make a snapshot from its shards.)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, safe_open

from echo2.p2p.codec import decode_record, encode_record
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import Finished, StepMetrics

from .consumed import ConsumedSet
from .interfaces import Progress
from .weights_file import write_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
PROGRESS_FILE = "progress.json"
PARTIAL_SUFFIX = ".partial"
FORMAT = 2
FORMAT_WITHOUT_CHECKSUM = 1
CHECKSUM = "sha256"

PROGRESS_BYTES_MAX = 64 << 20
"""Far above any: what is not acknowledged, and some entries for the consumed set."""

HASH_BYTES = 1 << 20

_NAME = re.compile(r"e(\d{6,12})-v(\d{8,12})")
"""No run comes to more; a longer number is nobody's epoch, and what follows it could not be published."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a file is to hold: each tensor's shape and type, and `load`, which gives one of them on the CPU.

    Asked for one at a time, so a model that is spread over several processes is never whole in any of them.
    """

    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    load: Callable[[str], Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Tensors that are all at hand."""
        return cls({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, tensors.__getitem__)

    def in_file_order(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Wide types first, so that every tensor lies where a mapped file can be read in place; then by name."""
        return dict(sorted(self.shapes.items(), key=lambda item: (-item[1][1].itemsize, item[0])))


class Damaged(Exception):
    """A checkpoint that cannot be gone on from; the text says why, for the log."""


class Checkpoints:
    """The checkpoints of one run in `folder`; the `kept` newest stay."""

    def __init__(self, folder: Path, *, kept: int) -> None:
        self._folder = folder
        self._kept = kept
        self._damaged: set[tuple[int, int]] = set()

    def save(self, progress: Progress, weights: Tensors, optimizer: Tensors) -> None:
        """One more checkpoint, durable when this returns. Raises OSError; those of before are untouched."""
        self._folder.mkdir(parents=True, exist_ok=True)
        final = self.path(progress.epoch, progress.version)
        if final.is_symlink() or (final.exists() and not final.is_dir()):  # not ours to remove
            raise FileExistsError(f"{final} is in the way, and is not a folder; move it away")
        if not _is(final, progress):  # else an earlier attempt failed only after its rename
            self._write(final, progress, {WEIGHTS_FILE: weights, OPTIMIZER_FILE: optimizer})
        _sync_folder(self._folder)
        names = self._names()
        # A damaged one must not push a whole one out. Its epoch is below this one's by now, so its name may go.
        whole = [name for name in names if name not in self._damaged or name == (progress.epoch, progress.version)]
        for epoch, version in set(names) - set(whole[-self._kept :]):
            shutil.rmtree(self.path(epoch, version), ignore_errors=True)

    def restore(self) -> tuple[Progress, Path] | None:
        """The newest complete checkpoint and its folder; None when none was ever finished.

        Its epoch is raised to the highest that any folder's name shows: a damaged one's may have been published. Raises
        ConfigurationError when all are damaged, and when the folder is no folder: starting over from the base model is
        for a person to decide.
        """
        if not self._folder.is_dir() and os.path.lexists(self._folder):
            raise ConfigurationError(
                f"{self._folder} is no folder (a link to what is gone, or a file), so no checkpoint can be reached; "
                "put it right, or move it away to start over from the base model"
            )
        try:
            names = self._names()
        except OSError as error:
            raise ConfigurationError(f"the checkpoints in {self._folder} cannot be read: {error.strerror}") from error
        for epoch, version in sorted(names, reverse=True):
            folder = self.path(epoch, version)
            try:
                progress = _read(folder)
            except Damaged as error:
                log.warning("the checkpoint %s is damaged and is passed over: %s", folder, error)
                self._damaged.add((epoch, version))
                continue
            return replace(progress, epoch=max(epoch for epoch, _ in names)), folder
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

    def _write(self, final: Path, progress: Progress, contents: Mapping[str, Tensors]) -> None:
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        for leftover in (*self._folder.glob(f"*{PARTIAL_SUFFIX}"), final):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            files = {}
            for name, tensors in contents.items():
                write_weights(partial / name, tensors.in_file_order(), tensors.load)
                files[name] = _fingerprint(partial / name)
            (partial / PROGRESS_FILE).write_text(json.dumps(_to_json(progress, files)) + "\n", encoding="utf-8")
            _sync_file(partial / PROGRESS_FILE)
            _sync_folder(partial)
            partial.rename(final)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk is not helped by half a checkpoint
            raise


class StoredTensors:
    """One file of a checkpoint, its tensors read when asked for: see `open_tensors`."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict

    def load(self, name: str) -> Tensor:
        """One tensor, mapped from the file where that can be. Raises OSError."""
        with _as_oserror(self._path):
            tensor: Tensor = self._file.get_tensor(name)
            return tensor


@contextmanager
def open_tensors(folder: Path, name: str) -> Iterator[StoredTensors]:
    """The tensors of `WEIGHTS_FILE` or `OPTIMIZER_FILE` of a checkpoint. Raises OSError."""
    path = folder / name
    with _as_oserror(path):
        file = safe_open(path, framework="pt")
    with file as opened:
        yield StoredTensors(path, opened)


def load_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of one of the two files. Raises OSError."""
    with open_tensors(folder, name) as stored:
        return {tensor: stored.load(tensor) for tensor in stored.shapes}


@contextmanager
def _as_oserror(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"cannot read {path}: {error}") from error


def _is(folder: Path, progress: Progress) -> bool:
    try:
        return _read(folder) == progress
    except Damaged:
        return False


def _read(folder: Path) -> Progress:
    """The progress in a checkpoint folder. Raises Damaged unless all in it is whole and is what its name says."""
    try:
        value = json.loads(_text(folder / PROGRESS_FILE))
        _check_whole(value, folder)
        progress = _from_json(value)
        found = {name: _fingerprint(folder / name) for name in (WEIGHTS_FILE, OPTIMIZER_FILE)}
        changed = [name for name in found if value["files"][name] != found[name]]
    except Damaged:
        raise
    except Exception as error:  # whatever damage leads to: a learner that cannot start is worse
        raise Damaged(f"{type(error).__name__}: {error}") from error
    if changed:
        raise Damaged(f"{changed[0]} is not what was written")
    named = _NAME.fullmatch(folder.name)
    if named is None or (progress.epoch, progress.version) != (int(named[1]), int(named[2])):
        raise Damaged(f"it is of epoch {progress.epoch}, version {progress.version}")
    return progress


def _text(path: Path) -> str:
    with _regular(path).open("rb") as file:
        content = file.read(PROGRESS_BYTES_MAX + 1)
    if len(content) > PROGRESS_BYTES_MAX:
        raise Damaged(f"{path.name} is too large")
    return content.decode("utf-8")


def _check_whole(value: Any, folder: Path) -> None:
    found = value.get(CHECKSUM)
    if value["format"] == FORMAT_WITHOUT_CHECKSUM and found is None:
        log.warning("the checkpoint %s is of an earlier release, without a checksum, and is taken on trust", folder)
    elif value["format"] not in (FORMAT, FORMAT_WITHOUT_CHECKSUM):
        raise Damaged(f"it is of format {str(value['format'])[:32]}, this version reads {FORMAT}")
    elif found != _checksum(value):
        raise Damaged(f"{PROGRESS_FILE} is not what was written")


def _checksum(value: Mapping[str, Any]) -> str:
    """SHA-256 of everything else, in the one way of writing it that does not depend on who writes it."""
    rest = {key: entry for key, entry in value.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _to_json(progress: Progress, files: Mapping[str, Any]) -> dict[str, Any]:
    value = {
        "format": FORMAT,
        "run": progress.run,
        "epoch": progress.epoch,
        "version": progress.version,
        "consumed": [[first, stop, f"{mask:x}"] for first, stop, mask in progress.consumed],
        "finished": [[e.lease_id.hex(), e.sample, e.state, e.step, e.reason] for e in progress.finished],
        "recent": [[e.lease_id.hex(), e.sample, e.step] for e in progress.recent],
        "steps": [encode_record(metrics).hex() for metrics in progress.steps],
        "files": files,
    }
    return value | {CHECKSUM: _checksum(value)}


def _from_json(value: Any) -> Progress:
    progress = Progress(
        run=value["run"],
        epoch=value["epoch"],
        version=value["version"],
        consumed=tuple((first, stop, int(mask, 16)) for first, stop, mask in value["consumed"]),
        finished=tuple(
            Finished(lease_id=bytes.fromhex(lease), sample=sample, state=state, step=step, reason=reason)
            for lease, sample, state, step, reason in value["finished"]
        ),
        steps=tuple(map(_step, value["steps"])),
        recent=tuple(
            Finished(lease_id=bytes.fromhex(lease), sample=sample, state="consumed", step=step, reason="")
            for lease, sample, step in value.get("recent", ())  # absent from checkpoints of the first releases
        ),
    )
    numbers = [progress.epoch, progress.version, *(end for run in progress.consumed for end in run[:2])]
    if not isinstance(progress.run, str) or any(type(number) is not int or number < 0 for number in numbers):
        raise Damaged("its run is no name, or a number is no count")
    ConsumedSet(progress.consumed)
    return progress


def _step(value: Any) -> StepMetrics:
    if isinstance(value, dict):  # as the first releases wrote it
        return StepMetrics.model_validate(value)
    return decode_record(bytes.fromhex(value), StepMetrics)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with _regular(path).open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _regular(path: Path) -> Path:
    if path.exists() and not path.is_file():
        raise Damaged(f"{path.name} is not a file")  # a device or a pipe may never end
    return path


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
