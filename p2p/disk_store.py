"""`SnapshotStore` on a disk. All file work is done in threads.

    <root>/partial/<manifest hash>/manifest        the signed manifest
    <root>/partial/<manifest hash>/snapshot.gguf   full length from the start, chunks written where they belong
    <root>/whole/<manifest hash>/...               the same two, moved here once the whole was verified and synced
    <root>/trash/...                               on its way out
    <root>/accepted.json                           the highest accepted manifest per (publisher, run)

A folder is whole by where it is, and it gets there by one rename, so that a kill between any two steps leaves a partial
one. Which chunks of a partial file are good is not written down but found by hashing it again: no journal can then
disagree with the bytes, whatever the power cut tore.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from .bitmap import below, bits_of, indices_in
from .chunks import chunks_of, extent, hash_pieces, verify_chunk
from .codec import decode_record, encode_record
from .disk_files import (
    Stamp,
    measure,
    pieces_of,
    read_accepted,
    read_at,
    stamp_of,
    storage_errors,
    sync,
    write_accepted,
    write_all,
    write_file,
)
from .errors import BadChunk, ConfigurationError, ProtocolError, StorageFull, Truncated
from .identity import payload_hash
from .manifest import highest_of, is_below
from .messages import Manifest, Signed
from .recent_chunks import RecentChunks
from .store import Accepted, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .chunks import ContentHashes

T = TypeVar("T")

FREE_BYTES_MIN = 256 << 20
"""Room left to the rest of the machine: a disk filled to the last byte breaks more than this process."""

MANIFEST_FILE_BYTES_MAX = 32 << 20
"""Above any signed manifest: bounds what is read at start."""


@dataclass(slots=True)
class _Entry:
    """`written` is how the file looked after our last write; None when not all of it was written by this process."""

    manifest: Manifest
    held: int = 0
    whole: bool = False
    written: Stamp | None = None
    writing: threading.Lock = field(default_factory=threading.Lock)


class DiskStore:
    """Snapshots under `root`, which one process owns. `bytes_max` caps what all of them together may take.

    Raises ConfigurationError when the folder cannot be used.
    """

    def __init__(self, root: Path, *, bytes_max: int | None = None) -> None:
        self._root = root
        self._bytes_max = bytes_max
        self._lock = trio.Lock()  # one change of the set of snapshots at a time; chunks need none
        self._entries: dict[bytes, _Entry] = {}
        self._recent = RecentChunks()
        self._accepted: dict[tuple[str, str], Accepted] = {}
        try:
            for name in ("partial", "whole", "trash"):
                (root / name).mkdir(parents=True, exist_ok=True)
            for leftover in (root / "trash").iterdir():
                shutil.rmtree(leftover, ignore_errors=True)
            self._accepted = read_accepted(root / "accepted.json")
            for folder in (root / "whole").iterdir():
                self._load_whole(folder)
        except OSError as error:
            raise ConfigurationError(f"cannot use the snapshot folder {root}: {error.strerror}") from error

    async def begin(self, signed: Signed, manifest: Manifest) -> None:
        """See `SnapshotStore`. Chunks of an interrupted download are hashed again, and kept if they verify."""
        manifest_hash = payload_hash(signed)
        async with self._lock:
            if manifest_hash in self._entries:
                return
            for other_hash, other in list(self._entries.items()):
                if not other.whole and is_below(other.manifest, manifest):
                    await self._discard(other_hash)
            held, written = await self._in_thread(self._make_room, signed, manifest, manifest_hash)
            self._entries[manifest_hash] = _Entry(manifest, held, written=written)

    def chunks_held(self, manifest_hash: bytes) -> frozenset[int]:
        """See `SnapshotStore`."""
        return frozenset(indices_in(self.held_bits(manifest_hash)))

    def held_bits(self, manifest_hash: bytes) -> int:
        """See `SnapshotStore`."""
        entry = self._entries.get(manifest_hash)
        return entry.held if entry else 0

    async def put_chunk(self, manifest_hash: bytes, index: int, data: bytes) -> None:
        """See `SnapshotStore`."""
        await self.put_chunks(manifest_hash, [(index, data)])

    async def put_chunks(self, manifest_hash: bytes, chunks: Sequence[tuple[int, bytes]]) -> None:
        """See `SnapshotStore`. One thread hop for all of them."""
        entry = self._entries[manifest_hash]
        for index, _ in chunks:
            extent(entry.manifest, index)
        new = [(index, data) for index, data in chunks if not entry.held >> index & 1]
        if not new:
            return
        kept: list[tuple[int, bytes]] = []
        try:
            wrong = await self._in_thread(self._write, manifest_hash, entry, new, kept)
        finally:
            if self._entries.get(manifest_hash) is entry:
                entry.held |= bits_of(index for index, _ in kept)
                for index, data in kept:
                    self._recent.keep(manifest_hash, index, data)
        if wrong:
            raise wrong

    async def get_chunk(self, manifest_hash: bytes, index: int) -> bytes:
        """See `SnapshotStore`."""
        return (await self.get_chunks(manifest_hash, [index]))[0]

    async def get_chunks(self, manifest_hash: bytes, indices: Sequence[int]) -> list[bytes]:
        """See `SnapshotStore`. From memory when all of them came just now, else one thread hop for all of them."""
        entry = self._entries[manifest_hash]
        for index in indices:
            if not entry.held >> index & 1:
                raise KeyError(index)
        recent = self._recent.get(manifest_hash, indices)
        if recent is not None:
            await trio.lowlevel.checkpoint()
            return recent
        return await self._in_thread(self._read, manifest_hash, entry.manifest, indices)

    async def complete(self, manifest_hash: bytes) -> Snapshot:
        """See `SnapshotStore`."""
        async with self._lock:
            return await self._complete(manifest_hash)

    def snapshots(self) -> tuple[Snapshot, ...]:
        """See `SnapshotStore`."""
        whole = [self._snapshot(manifest_hash) for manifest_hash, entry in self._entries.items() if entry.whole]
        return tuple(sorted(whole, key=lambda snapshot: (snapshot.manifest.epoch, snapshot.manifest.version)))

    async def measure(self, path: Path) -> ContentHashes:
        """See `SnapshotStore`."""
        return await self._in_thread(measure, path)

    async def adopt(self, signed: Signed, manifest: Manifest, path: Path) -> Snapshot:
        """See `SnapshotStore`."""
        return await self._install(signed, manifest, path, keep=False)

    async def alias(self, signed: Signed, manifest: Manifest, existing_hash: bytes) -> Snapshot:
        """See `SnapshotStore`. A hard link, or a copy where the file system has none."""
        if not self._entries[existing_hash].whole:
            raise KeyError(existing_hash)
        return await self._install(signed, manifest, self._snapshot(existing_hash).path, keep=True)

    async def discard(self, manifest_hash: bytes) -> None:
        """See `SnapshotStore`."""
        async with self._lock:
            await self._discard(manifest_hash)

    def accepted(self, publisher: str, run: str) -> Accepted | None:
        """See `SnapshotStore`."""
        return self._accepted.get((publisher, run))

    async def accept(self, manifest: Manifest, manifest_hash: bytes) -> None:
        """See `SnapshotStore`."""
        async with self._lock:
            key = (manifest.publisher, manifest.run)
            highest = highest_of(self._accepted.get(key), manifest, manifest_hash)
            if highest != self._accepted.get(key):
                changed = {**self._accepted, key: highest}
                await self._in_thread(write_accepted, self._root / "accepted.json", changed)
                self._accepted = changed

    # on the trio side

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        with storage_errors(self._root):
            return await trio.to_thread.run_sync(partial(work, *arguments))

    def _snapshot(self, manifest_hash: bytes) -> Snapshot:
        path = self._folder("whole", manifest_hash) / "snapshot.gguf"
        return Snapshot(self._entries[manifest_hash].manifest, manifest_hash, path)

    async def _complete(self, manifest_hash: bytes) -> Snapshot:
        entry = self._entries[manifest_hash]
        if not entry.whole:
            count = chunks_of(entry.manifest)
            if entry.held.bit_count() < count:
                raise Truncated(f"only {entry.held.bit_count()} of {count} chunks are here")
            if not await self._in_thread(self._verify_and_move, manifest_hash, entry):
                await self._discard(manifest_hash)
                raise BadChunk("every chunk verified, but the whole is not the snapshot the manifest names")
            entry.whole = True
        return self._snapshot(manifest_hash)

    async def _discard(self, manifest_hash: bytes) -> None:
        await self._in_thread(self._remove, manifest_hash)
        self._entries.pop(manifest_hash, None)
        self._recent.drop(manifest_hash)

    async def _install(self, signed: Signed, manifest: Manifest, path: Path, *, keep: bool) -> Snapshot:
        manifest_hash = payload_hash(signed)
        async with self._lock:
            entry = self._entries.get(manifest_hash)
            if entry is None or not entry.whole:
                await self._in_thread(self._link_and_move, signed, manifest, manifest_hash, path, keep)
                self._entries[manifest_hash] = _Entry(manifest, below(chunks_of(manifest)), whole=True)
            return self._snapshot(manifest_hash)

    # in a thread

    def _folder(self, where: str, manifest_hash: bytes) -> Path:
        return self._root / where / manifest_hash.hex()

    def _load_whole(self, folder: Path) -> None:
        file = folder / "manifest"
        with suppress(OSError, ProtocolError):
            if file.stat().st_size <= MANIFEST_FILE_BYTES_MAX:
                signed = decode_record(file.read_bytes(), Signed)
                manifest = decode_record(signed.payload, Manifest)
                whole = (folder / "snapshot.gguf").stat().st_size == manifest.length_bytes
                if whole and payload_hash(signed).hex() == folder.name:
                    self._entries[payload_hash(signed)] = _Entry(manifest, below(chunks_of(manifest)), whole=True)
                    return
        self._trash(folder)  # damaged from outside: of no use, and never to be taken for whole

    def _make_room(self, signed: Signed, manifest: Manifest, manifest_hash: bytes) -> tuple[int, Stamp | None]:
        folder = self._folder("partial", manifest_hash)
        file = folder / "snapshot.gguf"
        if file.exists() and file.stat().st_size == manifest.length_bytes:
            held = 0
            with file.open("rb", buffering=0) as opened:
                for index, piece in enumerate(pieces_of(opened, manifest.chunk_bytes)):
                    with suppress(BadChunk):
                        verify_chunk(manifest, index, piece)
                        held |= 1 << index
            return held, None
        self._check_room(manifest.length_bytes)
        folder.mkdir(exist_ok=True)
        write_file(folder / "manifest", encode_record(signed), durable=False)
        try:
            with file.open("wb", buffering=0) as opened:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(opened.fileno(), 0, manifest.length_bytes)
                else:
                    opened.truncate(manifest.length_bytes)
                return 0, stamp_of(opened)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # half the room is of no use, and others may need it
            raise

    def _check_room(self, length_bytes: int) -> None:
        free = shutil.disk_usage(self._root).free
        if free < length_bytes + FREE_BYTES_MIN:
            raise StorageFull(
                f"a snapshot of {length_bytes >> 20} MiB does not fit in {self._root}: {free >> 20} MiB are free and "
                f"{FREE_BYTES_MIN >> 20} MiB must stay free; delete something or move the folder"
            )
        if self._bytes_max is not None:
            used = sum(entry.manifest.length_bytes for entry in list(self._entries.values()))
            if used + length_bytes > self._bytes_max:
                raise StorageFull(
                    f"a snapshot of {length_bytes >> 20} MiB does not fit: {used >> 20} of the {self._bytes_max >> 20} "
                    f"MiB allowed for snapshots are in use; raise the limit"
                )

    def _write(
        self,
        manifest_hash: bytes,
        entry: _Entry,
        chunks: Sequence[tuple[int, bytes]],
        kept: list[tuple[int, bytes]],
    ) -> BadChunk | None:
        wrong: BadChunk | None = None
        good: list[tuple[int, bytes]] = []
        for index, data in chunks:
            try:
                verify_chunk(entry.manifest, index, data)
                good.append((index, data))
            except BadChunk as error:
                wrong = wrong or error
        path = self._folder("partial", manifest_hash) / "snapshot.gguf"
        # Two sources' batches one after the other: in between, the stamp would be wrong.
        with entry.writing, path.open("r+b", buffering=0) as opened:
            ours = entry.written is not None and entry.written == stamp_of(opened)
            entry.written = None
            for index, data in good:
                opened.seek(extent(entry.manifest, index)[0])
                write_all(opened, data)
                kept.append((index, data))
            if ours:
                entry.written = stamp_of(opened)
        return wrong

    def _read(self, manifest_hash: bytes, manifest: Manifest, indices: Sequence[int]) -> list[bytes]:
        for where in ("whole", "partial", "whole"):  # it may be moved between two looks
            with suppress(FileNotFoundError):
                path = self._folder(where, manifest_hash) / "snapshot.gguf"
                with path.open("rb", buffering=0) as opened:
                    return [read_at(opened, *extent(manifest, index)) for index in indices]
        raise KeyError(manifest_hash)

    def _verify_and_move(self, manifest_hash: bytes, entry: _Entry) -> bool:
        """The whole is read again unless it was written here, verified chunk by chunk, and by nobody else since."""
        folder, manifest = self._folder("partial", manifest_hash), entry.manifest
        with (folder / "snapshot.gguf").open("r+b", buffering=0) as opened:
            plain = (manifest.kind, manifest.codec) == ("full", "raw")  # or else the hash is of the decoded bytes
            if not plain or entry.written is None or entry.written != stamp_of(opened):
                found = hash_pieces(pieces_of(opened, manifest.chunk_bytes), manifest.chunk_bytes)
                if found.snapshot_sha256 != manifest.snapshot_sha256:
                    return False
            os.fsync(opened.fileno())
        self._move(folder, manifest_hash)
        return True

    def _link_and_move(self, signed: Signed, manifest: Manifest, manifest_hash: bytes, path: Path, keep: bool) -> None:
        with path.open("rb", buffering=0) as opened:
            if os.fstat(opened.fileno()).st_size != manifest.length_bytes:
                raise BadChunk(f"{path} is not of the {manifest.length_bytes} bytes the manifest names")
            found = hash_pieces(pieces_of(opened, manifest.chunk_bytes), manifest.chunk_bytes)
            if (found.chunk_sha256, found.snapshot_sha256) != (manifest.chunk_sha256, manifest.snapshot_sha256):
                raise BadChunk(f"the bytes of {path} are not what the manifest names")
        self._trash(self._folder("partial", manifest_hash))
        folder = self._folder("partial", manifest_hash)
        folder.mkdir()
        write_file(folder / "manifest", encode_record(signed), durable=False)
        file = folder / "snapshot.gguf"
        try:
            os.link(path, file)
        except OSError:  # another file system, or one without links
            self._check_room(manifest.length_bytes)
            shutil.copyfile(path, file)
        with file.open("r+b", buffering=0) as opened:
            os.fsync(opened.fileno())
        self._move(folder, manifest_hash)
        if not keep:
            path.unlink()

    def _move(self, folder: Path, manifest_hash: bytes) -> None:
        """The bytes are verified and synced: make the folder a whole one, durably."""
        sync(folder / "manifest")
        sync(folder)
        self._trash(self._folder("whole", manifest_hash))  # only ever one that was damaged from outside
        folder.rename(self._folder("whole", manifest_hash))
        sync(self._root / "whole")
        sync(self._root / "partial")

    def _remove(self, manifest_hash: bytes) -> None:
        for where in ("whole", "partial"):
            self._trash(self._folder(where, manifest_hash))

    def _trash(self, folder: Path) -> None:
        """Out of sight by one rename first: a kill while deleting must not leave half a folder among the whole ones."""
        target = self._root / "trash" / f"{folder.parent.name}-{folder.name}"
        with suppress(FileNotFoundError):
            if target.exists():
                shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
            shutil.rmtree(target, ignore_errors=True)
