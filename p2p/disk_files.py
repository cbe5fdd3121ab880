"""Files as `disk_store` needs them: read in pieces, written whole or not at all, synced; errors in our own classes."""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from .chunks import ContentHashes, chunk_bytes_for, hash_pieces
from .errors import ConfigurationError, StorageFailed, StorageFull
from .store import Accepted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


class Stamp(NamedTuple):
    """What changes when somebody writes to a file, or puts another in its place.

    Not a proof: times are those of the kernel's ticks, so a write within 10 ms of our own goes unnoticed.
    """

    device: int
    inode: int
    length_bytes: int
    modified_nanoseconds: int
    changed_nanoseconds: int


def stamp_of(opened: FileIO) -> Stamp:
    """As the file is now."""
    status = os.fstat(opened.fileno())
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Whatever the system says of a file under `root`, as StorageFull or StorageFailed."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(f"the disk of {root} is full ({error.strerror}); what was verified is kept") from error
        raise StorageFailed(f"cannot use {error.filename or root}: {error.strerror}") from error


def measure(path: Path) -> ContentHashes:
    """Hash a file, with the chunk size that is right for its length."""
    with path.open("rb", buffering=0) as opened:
        length = os.fstat(opened.fileno()).st_size
        return hash_pieces(pieces_of(opened, chunk_bytes_for(length)), chunk_bytes_for(length))


def pieces_of(opened: FileIO, piece_bytes: int) -> Iterator[memoryview]:
    """The file from its start in full pieces. Each is valid until the next is taken: one buffer serves all."""
    opened.seek(0)
    buffer = memoryview(bytearray(piece_bytes))
    filled = 0
    while count := opened.readinto(buffer[filled:]):
        filled += count
        if filled == piece_bytes:
            yield buffer
            filled = 0
    if filled:
        yield buffer[:filled]


def read_at(opened: FileIO, offset: int, length: int) -> bytes:
    """Exactly these bytes."""
    opened.seek(offset)
    data = opened.read(length)
    while len(data) < length:
        more = opened.read(length - len(data))
        if not more:
            raise OSError(errno.EIO, "a snapshot file is shorter than it was", opened.name)
        data += more
    return data


def write_all(opened: FileIO, data: bytes) -> None:
    """Everything, at the file's position: one write may take less."""
    view = memoryview(data)
    while view:
        view = view[opened.write(view) :]


def write_file(path: Path, data: bytes, *, durable: bool) -> None:
    """Replace a file by one rename; when `durable`, the new one survives a power cut once this returns."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as opened:
        opened.write(data)
        opened.flush()
        if durable:
            os.fsync(opened.fileno())
    temporary.replace(path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """fsync a file or, where the system can, a folder."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_accepted(path: Path) -> dict[tuple[str, str], Accepted]:
    """What `write_accepted` wrote; nothing when there is no file. Raises ConfigurationError when it is damaged."""
    if not path.exists():
        return {}
    try:
        return {
            (line["publisher"], line["run"]): Accepted(
                int(line["epoch"]), int(line["version"]), bytes.fromhex(line["manifest_hash"])
            )
            for line in json.loads(path.read_text(encoding="utf-8"))
        }
    except (ValueError, KeyError, TypeError) as error:
        # Starting from nothing would let an old manifest be replayed.
        raise ConfigurationError(f"{path} is damaged; restore it, or remove it to accept any version anew") from error


def write_accepted(path: Path, accepted: dict[tuple[str, str], Accepted]) -> None:
    """The highest accepted manifests, durably."""
    lines = [
        {
            "publisher": publisher,
            "run": run,
            "epoch": highest.epoch,
            "version": highest.version,
            "manifest_hash": highest.manifest_hash.hex(),
        }
        for (publisher, run), highest in sorted(accepted.items())
    ]
    write_file(path, json.dumps(lines, indent=1).encode(), durable=True)
