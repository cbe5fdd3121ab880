"""What every SnapshotStore does, asked of the one on a disk and of the one in memory."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from echo2.p2p.chunks import chunks_of, hash_pieces
from echo2.p2p.disk_store import DiskStore
from echo2.p2p.errors import BadChunk, ConfigurationError, SchemaViolation, StorageFailed, StorageFull, Truncated
from echo2.p2p.identity import Identity, payload_hash
from echo2.p2p.manifest import make_manifest
from echo2.p2p.memory_store import MemoryStore

LEARNER = Identity(b"L" * 32)
CHUNK = 1024
DATA = bytes(range(251)) * 11  # two full chunks and a short one


class MemoryDisk:
    """`open` comes back to what was there, as after a crash."""

    def __init__(self, tmp_path):
        self.tmp_path = tmp_path
        self.store = None

    def open(self, bytes_max=None):
        if self.store is None:
            self.store = MemoryStore(bytes_max=bytes_max)
        return self.store

    def write(self, name, data):
        path = Path(name)
        self.store.files[path] = data
        return path

    def read(self, path):
        return self.store.files[path]

    def exists(self, path):
        return path in self.store.files


class RealDisk:
    """A new DiskStore on the same folder each time: nothing but the files survives."""

    def __init__(self, tmp_path):
        self.tmp_path = tmp_path

    def open(self, bytes_max=None):
        return DiskStore(self.tmp_path / "store", bytes_max=bytes_max)

    def write(self, name, data):
        path = self.tmp_path / name
        path.write_bytes(data)
        return path

    def read(self, path):
        return path.read_bytes()

    def exists(self, path):
        return path.exists()


@pytest.fixture(params=[MemoryDisk, RealDisk], ids=["memory", "disk"])
def disk(request, tmp_path):
    return request.param(tmp_path)


@pytest.fixture
def real(tmp_path):
    return RealDisk(tmp_path)


def manifest_of(data, *, version=0, epoch=0, **changes):
    pieces = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    made = make_manifest(
        hash_pieces(pieces, CHUNK),
        run="r",
        publisher=LEARNER.peer_id,
        epoch=epoch,
        version=version,
        domain="f16",
        previous_hash=None,
        created_seconds=0.0,
    ).model_copy(update=changes)
    signed = LEARNER.sign("manifest", made)
    return signed, made, payload_hash(signed)


def piece(data, index):
    return data[index * CHUNK : (index + 1) * CHUNK]


async def fill(store, data, **order):
    signed, manifest, manifest_hash = manifest_of(data, **order)
    await store.begin(signed, manifest)
    await store.put_chunks(manifest_hash, [(i, piece(data, i)) for i in range(chunks_of(manifest))])
    return await store.complete(manifest_hash)


async def test_whole_way(disk):
    """Chunks in any order, read back as soon as they are in, and the snapshot is whole at the end."""
    store = disk.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    assert store.chunks_held(manifest_hash) == frozenset()
    await store.begin(signed, manifest)
    assert store.chunks_held(manifest_hash) == frozenset()
    await store.put_chunk(manifest_hash, 2, piece(DATA, 2))
    assert store.chunks_held(manifest_hash) == {2}
    assert await store.get_chunk(manifest_hash, 2) == piece(DATA, 2)
    await store.put_chunks(manifest_hash, [(1, piece(DATA, 1)), (0, piece(DATA, 0))])
    assert store.snapshots() == ()
    snapshot = await store.complete(manifest_hash)
    assert disk.read(snapshot.path) == DATA
    assert (snapshot.manifest, snapshot.manifest_hash) == (manifest, manifest_hash)
    assert store.snapshots() == (snapshot,)
    assert store.chunks_held(manifest_hash) == {0, 1, 2}
    assert await store.get_chunks(manifest_hash, [2, 0]) == [piece(DATA, 2), piece(DATA, 0)]


async def test_repeating_is_safe(disk):
    """begin, put_chunk, complete and discard may each be repeated."""
    store = disk.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    for _ in range(2):
        await store.begin(signed, manifest)
        for index in range(3):
            await store.put_chunk(manifest_hash, index, piece(DATA, index))
    first = await store.complete(manifest_hash)
    await store.begin(signed, manifest)
    await store.put_chunk(manifest_hash, 0, piece(DATA, 0))
    assert await store.complete(manifest_hash) == first
    for _ in range(2):
        await store.discard(manifest_hash)
    assert store.snapshots() == ()
    assert not disk.exists(first.path)


async def test_flipped_bit(disk):
    """A chunk with a flipped bit is refused and not kept; the good ones it came with are."""
    store = disk.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    await store.begin(signed, manifest)
    bad = bytes([DATA[CHUNK] ^ 0x80]) + piece(DATA, 1)[1:]
    with pytest.raises(BadChunk):
        await store.put_chunks(manifest_hash, [(0, piece(DATA, 0)), (1, bad), (2, piece(DATA, 2))])
    assert store.chunks_held(manifest_hash) == {0, 2}
    with pytest.raises(KeyError):
        await store.get_chunk(manifest_hash, 1)


async def test_outside(disk):
    """An index outside the manifest is the sender's fault; an unknown snapshot is a KeyError."""
    store = disk.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    await store.begin(signed, manifest)
    with pytest.raises(SchemaViolation):
        await store.put_chunk(manifest_hash, 3, b"x")
    for call in (store.put_chunk(bytes(32), 0, b"x"), store.get_chunk(bytes(32), 0), store.complete(bytes(32))):
        with pytest.raises(KeyError):
            await call


async def test_incomplete(disk):
    """A snapshot with a missing chunk is never completed; nothing is listed, and what came stays."""
    store = disk.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    await store.begin(signed, manifest)
    await store.put_chunks(manifest_hash, [(0, piece(DATA, 0)), (1, piece(DATA, 1))])
    with pytest.raises(Truncated, match="2 of 3"):
        await store.complete(manifest_hash)
    assert store.snapshots() == ()
    assert store.chunks_held(manifest_hash) == {0, 1}


async def test_whole_is_wrong(disk):
    """When each chunk verifies but the whole does not, nothing is installed, the bytes go, and older ones stay."""
    store = disk.open()
    older = await fill(store, DATA, version=0)
    signed, manifest, manifest_hash = manifest_of(
        DATA[::-1], version=1, snapshot_sha256=hashlib.sha256(b"other").digest()
    )
    await store.begin(signed, manifest)
    await store.put_chunks(manifest_hash, [(i, piece(DATA[::-1], i)) for i in range(3)])
    store = disk.open()  # what the chunks' hashes say of bytes that an earlier process wrote is not enough
    await store.begin(signed, manifest)
    with pytest.raises(BadChunk):
        await store.complete(manifest_hash)
    assert store.snapshots() == (older,)
    assert disk.read(older.path) == DATA
    store = disk.open()
    assert [snapshot.manifest_hash for snapshot in store.snapshots()] == [older.manifest_hash]


async def begun(store, count=3):
    """A snapshot whose first `count` chunks are in the store; its manifest and hash, and where its file is."""
    signed, manifest, manifest_hash = manifest_of(DATA)
    await store.begin(signed, manifest)
    await store.put_chunks(manifest_hash, [(i, piece(DATA, i)) for i in range(count)])
    return manifest_hash, store._folder("partial", manifest_hash) / "snapshot.gguf"


async def test_written_here_is_not_read_again(real, monkeypatch):
    """A file of which each chunk was verified and written by this process is installed without another look."""
    store = real.open()
    manifest_hash, _ = await begun(store, count=1)
    await store.put_chunks(manifest_hash, [(1, piece(DATA, 1)), (2, piece(DATA, 2))])
    synced = []
    monkeypatch.setattr("echo2.p2p.disk_store.hash_pieces", None)
    monkeypatch.setattr("os.fsync", synced.append)
    assert real.read((await store.complete(manifest_hash)).path) == DATA
    assert synced


@pytest.mark.parametrize("when", ["before the last chunk", "after it"])
@pytest.mark.parametrize("what", ["a byte", "the file"])
async def test_changed_under_us(real, when, what):
    """When somebody else wrote to the file, or put another in its place, the whole is read and found out."""
    store = real.open()
    manifest_hash, path = await begun(store, count=3 if when == "after it" else 2)
    stat = path.stat()
    damaged = bytearray(path.read_bytes())
    damaged[5] ^= 1
    if what == "a byte":
        path.write_bytes(damaged)
    else:
        path.with_name("other").write_bytes(damaged)
        path.with_name("other").replace(path)
    # As if it had happened later: the kernel's clock may not have ticked since our own write.
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 20_000_000))
    if when != "after it":
        await store.put_chunk(manifest_hash, 2, piece(DATA, 2))
    with pytest.raises(BadChunk):
        await store.complete(manifest_hash)
    assert store.snapshots() == ()
    assert not path.exists()


async def test_changed_and_changed_back(real):
    """A file that another wrote to is installed when its bytes are right all the same."""
    store = real.open()
    manifest_hash, path = await begun(store)
    path.write_bytes(DATA)
    os.utime(path, ns=(0, 0))
    assert real.read((await store.complete(manifest_hash)).path) == DATA


@pytest.mark.parametrize("changes", [{"kind": "delta"}, {"codec": "zstd"}], ids=["delta", "zstd"])
async def test_the_hash_of_decoded_bytes_is_another_matter(real, changes):
    """What is not a whole plain snapshot is never installed on the word of its chunks."""
    with pytest.raises(BadChunk):
        await fill(real.open(), DATA, snapshot_sha256=hashlib.sha256(b"decoded").digest(), **changes)


async def test_a_failed_write_is_written_again(real, monkeypatch):
    """After a write that failed half-way the file is whole in the end, and nothing of the torn chunk is left."""
    store = real.open()
    manifest_hash, _ = await begun(store, count=1)

    def torn(opened, data):
        opened.write(data[:100])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("echo2.p2p.disk_store.write_all", torn)
        with pytest.raises(StorageFailed):
            await store.put_chunk(manifest_hash, 1, piece(DATA, 1))
    assert store.chunks_held(manifest_hash) == {0}
    await store.put_chunks(manifest_hash, [(1, piece(DATA, 1)), (2, piece(DATA, 2))])
    assert real.read((await store.complete(manifest_hash)).path) == DATA


async def test_just_verified_is_served_from_memory(real):
    """Chunks that came just now are handed out without a look at the disk; those of a discarded snapshot are not."""
    store = real.open()
    manifest_hash, path = await begun(store)
    path.unlink()
    assert await store.get_chunks(manifest_hash, [2, 0]) == [piece(DATA, 2), piece(DATA, 0)]
    await store.discard(manifest_hash)
    with pytest.raises(KeyError):
        await store.get_chunk(manifest_hash, 0)


async def test_held_bits(disk):
    """The held chunks as a bitmap are the held chunks, whole or not, after a restart too."""
    store = disk.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    assert store.held_bits(manifest_hash) == 0
    await store.begin(signed, manifest)
    await store.put_chunks(manifest_hash, [(0, piece(DATA, 0)), (2, piece(DATA, 2))])
    assert store.held_bits(manifest_hash) == 0b101
    store = disk.open()
    await store.begin(signed, manifest)
    assert store.held_bits(manifest_hash) == 0b101
    await store.put_chunk(manifest_hash, 1, piece(DATA, 1))
    await store.complete(manifest_hash)
    assert disk.open().held_bits(manifest_hash) == 0b111


async def test_resume(disk):
    """After a crash in the middle the chunks that had been kept are kept still."""
    store = disk.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    await store.begin(signed, manifest)
    await store.put_chunks(manifest_hash, [(0, piece(DATA, 0)), (2, piece(DATA, 2))])
    store = disk.open()
    assert store.snapshots() == ()
    await store.begin(signed, manifest)
    assert store.chunks_held(manifest_hash) == {0, 2}
    await store.put_chunk(manifest_hash, 1, piece(DATA, 1))
    assert disk.read((await store.complete(manifest_hash)).path) == DATA


async def test_restart_with_whole_ones(disk):
    """Complete snapshots are there after a restart, oldest first, epoch before version."""
    store = disk.open()
    for number, (epoch, version) in enumerate([(1, 2), (0, 7), (0, 9)]):
        await fill(store, DATA + bytes([number]), epoch=epoch, version=version)
    store = disk.open()
    assert [(s.manifest.epoch, s.manifest.version) for s in store.snapshots()] == [(0, 7), (0, 9), (1, 2)]
    assert await store.get_chunk(store.snapshots()[0].manifest_hash, 0) == piece(DATA, 0)


async def test_superseded_partials_go(disk):
    """Beginning a newer snapshot forgets unfinished older ones of the run, and keeps whole ones."""
    store = disk.open()
    whole = await fill(store, DATA, version=0)
    signed, manifest, older = manifest_of(DATA + b"1", version=1)
    await store.begin(signed, manifest)
    await store.put_chunk(older, 0, piece(DATA, 0))
    signed, manifest, _ = manifest_of(DATA + b"2", version=2)
    await store.begin(signed, manifest)
    assert store.chunks_held(older) == frozenset()
    assert store.snapshots() == (whole,)


async def test_adopt(disk):
    """A file of this process becomes a snapshot: moved, whole, and served by chunks."""
    store = disk.open()
    path = disk.write("export", DATA)
    measured = await store.measure(path)
    assert (measured.length_bytes, measured.snapshot_sha256) == (len(DATA), hashlib.sha256(DATA).digest())
    signed, manifest, manifest_hash = manifest_of(DATA)
    snapshot = await store.adopt(signed, manifest, path)
    assert disk.read(snapshot.path) == DATA
    assert not disk.exists(path)
    assert await store.get_chunk(manifest_hash, 1) == piece(DATA, 1)
    assert [s.manifest_hash for s in disk.open().snapshots()] == [manifest_hash]


@pytest.mark.parametrize("data", [DATA[:-1], DATA[:-1] + b"\0"], ids=["short", "changed"])
async def test_adopt_another_file(disk, data):
    """A file that is not what the manifest names is not adopted, and is left where it is."""
    store = disk.open()
    path = disk.write("export", data)
    signed, manifest, _ = manifest_of(DATA)
    with pytest.raises(BadChunk):
        await store.adopt(signed, manifest, path)
    assert store.snapshots() == ()
    assert disk.read(path) == data


async def test_alias(disk):
    """The same bytes under a new manifest need no download, and stay when the old name goes."""
    store = disk.open()
    old = await fill(store, DATA, epoch=0, version=4)
    signed, manifest, manifest_hash = manifest_of(DATA, epoch=1, version=4)
    new = await store.alias(signed, manifest, old.manifest_hash)
    assert [s.manifest.epoch for s in store.snapshots()] == [0, 1]
    await store.discard(old.manifest_hash)
    assert disk.read(new.path) == DATA
    assert await store.get_chunk(manifest_hash, 0) == piece(DATA, 0)


async def test_alias_refused(disk):
    """An alias of what is not whole is a KeyError; one whose chunk hashes do not fit is refused."""
    store = disk.open()
    signed, manifest, manifest_hash = manifest_of(DATA, version=0)
    await store.begin(signed, manifest)
    newer_signed, newer, _ = manifest_of(DATA, version=1)
    for unknown in (manifest_hash, bytes(32)):
        with pytest.raises(KeyError):
            await store.alias(newer_signed, newer, unknown)
    old = await fill(store, DATA, version=0)
    lying_signed, lying, _ = manifest_of(DATA, version=1, chunk_sha256=bytes(96))
    with pytest.raises(BadChunk):
        await store.alias(lying_signed, lying, old.manifest_hash)
    assert store.snapshots() == (old,)


async def test_accepted_survives(disk):
    """The highest accepted manifest is remembered across restarts, per publisher and run, and never falls."""
    store = disk.open()
    assert store.accepted(LEARNER.peer_id, "r") is None
    _, newer, newer_hash = manifest_of(DATA, epoch=1, version=3)
    _, older, older_hash = manifest_of(DATA, epoch=0, version=9)
    await store.accept(newer, newer_hash)
    await store.accept(older, older_hash)
    store = disk.open()
    highest = store.accepted(LEARNER.peer_id, "r")
    assert (highest.epoch, highest.version, highest.manifest_hash) == (1, 3, newer_hash)
    assert store.accepted(LEARNER.peer_id, "another") is None


async def test_no_room(disk):
    """A snapshot above what may be used is refused in words, before anything is written; others stay."""
    store = disk.open(bytes_max=2 * len(DATA))
    whole = await fill(store, DATA, version=0)
    signed, manifest, manifest_hash = manifest_of(DATA * 2, version=1)
    with pytest.raises(StorageFull, match="does not fit"):
        await store.begin(signed, manifest)
    assert store.chunks_held(manifest_hash) == frozenset()
    assert store.snapshots() == (whole,)


async def test_disk_fills_up(real, monkeypatch):
    """When the disk fills between two chunks the error says so, the chunks before stay, and it goes on later."""
    store = real.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    await store.begin(signed, manifest)
    write = "echo2.p2p.disk_store.write_all"

    def full(opened, data):
        if data == piece(DATA, 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        opened.write(data)

    with monkeypatch.context() as patched:
        patched.setattr(write, full)
        with pytest.raises(StorageFull, match="full"):
            await store.put_chunks(manifest_hash, [(i, piece(DATA, i)) for i in range(3)])
    assert store.chunks_held(manifest_hash) == {0}
    await store.put_chunks(manifest_hash, [(i, piece(DATA, i)) for i in range(3)])
    assert real.read((await store.complete(manifest_hash)).path) == DATA


async def test_full_at_begin(real, monkeypatch):
    """When the disk has no room for the file at all, nothing of it stays behind."""
    store = real.open()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    signed, manifest, _ = manifest_of(DATA)
    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", full)
        with pytest.raises(StorageFull):
            await store.begin(signed, manifest)
    assert list((real.tmp_path / "store" / "partial").iterdir()) == []
    monkeypatch.setattr("echo2.p2p.disk_store.FREE_BYTES_MIN", 1 << 60)
    with pytest.raises(StorageFull, match="must stay free"):
        await store.begin(signed, manifest)


async def test_torn_partial(real):
    """Bytes of a partial file that were torn by a power cut are found out on resume, and only those are missing."""
    store = real.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    await store.begin(signed, manifest)
    await store.put_chunks(manifest_hash, [(i, piece(DATA, i)) for i in range(3)])
    (file,) = (real.tmp_path / "store" / "partial").glob("*/snapshot.gguf")
    torn = bytearray(file.read_bytes())
    torn[CHUNK + 5] ^= 1
    file.write_bytes(torn)
    store = real.open()
    await store.begin(signed, manifest)
    assert store.chunks_held(manifest_hash) == {0, 2}


@pytest.mark.parametrize("crash", ["os.fsync", "echo2.p2p.disk_store.sync", "pathlib.Path.rename"])
async def test_crash_while_completing(real, monkeypatch, crash):
    """A crash at any step of completing leaves a partial snapshot, never one that looks whole."""
    store = real.open()
    signed, manifest, manifest_hash = manifest_of(DATA)
    await store.begin(signed, manifest)
    await store.put_chunks(manifest_hash, [(i, piece(DATA, i)) for i in range(3)])

    def die(*_):
        raise OSError(errno.EIO, "crash")

    with monkeypatch.context() as patched:
        patched.setattr(crash, die)
        with pytest.raises(StorageFailed):
            await store.complete(manifest_hash)
    store = real.open()
    assert store.snapshots() == ()
    await store.begin(signed, manifest)
    assert store.chunks_held(manifest_hash) == {0, 1, 2}
    assert real.read((await store.complete(manifest_hash)).path) == DATA


@pytest.mark.parametrize("damage", ["truncate", "no file", "no manifest", "wrong manifest"])
async def test_damaged_from_outside(real, damage):
    """A snapshot folder somebody damaged is not taken for a whole one after a restart."""
    snapshot = await fill(real.open(), DATA)
    manifest = snapshot.path.with_name("manifest")
    match damage:
        case "truncate":
            os.truncate(snapshot.path, len(DATA) - 1)
        case "no file":
            snapshot.path.unlink()
        case "no manifest":
            manifest.unlink()
        case "wrong manifest":
            manifest.write_bytes(b"\x00")
    assert real.open().snapshots() == ()


def test_unusable_folder(tmp_path):
    """A folder that cannot be used is the user's to mend, and so is a damaged record of what was accepted."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="snapshot folder"):
        DiskStore(tmp_path / "file" / "store")
    DiskStore(tmp_path / "store")
    (tmp_path / "store" / "accepted.json").write_text('[{"run"')
    with pytest.raises(ConfigurationError, match="damaged"):
        DiskStore(tmp_path / "store")
