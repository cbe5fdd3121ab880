"""What a snapshot's manifest must satisfy, and which manifest may follow which. Pure (DESIGN section 8).

Order of the checks on a manifest from the network: signature (before a byte is parsed), schema, meaning
(`check_manifest`), then order (`check_order`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .chunks import DIGEST_BYTES, chunk_count
from .errors import SchemaViolation, StaleManifest
from .identity import open_signed, payload_hash
from .messages import Manifest
from .store import Accepted

if TYPE_CHECKING:
    from .chunks import ContentHashes
    from .messages import Signed

LIFETIME_SECONDS = 30 * 24 * 3600.0
"""How long a manifest may be accepted by a node that never saw a later one: longer than any pause of a run, since a
resumed learner publishes anew; short enough that a captured one cannot be replayed to new nodes for ever."""


def make_manifest(
    content: ContentHashes,
    *,
    run: str,
    publisher: str,
    epoch: int,
    version: int,
    domain: Literal["f32", "f16", "bf16", "q8_0"],
    previous_hash: bytes | None,
    created_seconds: float,
    base_hash: bytes | None = None,
) -> Manifest:
    """Describe a snapshot whose bytes hash to `content` (`SnapshotStore.measure`); the learner signs it.

    With `base_hash`, the hash of a whole snapshot's manifest, the bytes are an adapter on that snapshot.
    """
    manifest = Manifest(
        run=run,
        publisher=publisher,
        epoch=epoch,
        version=version,
        kind="full" if base_hash is None else "adapter",
        base_hash=base_hash,
        anchor_hash=None,
        codec="raw",
        domain=domain,
        length_bytes=content.length_bytes,
        chunk_bytes=content.chunk_bytes,
        chunk_sha256=content.chunk_sha256,
        snapshot_sha256=content.snapshot_sha256,
        previous_hash=previous_hash,
        created_seconds=created_seconds,
        expires_seconds=created_seconds + LIFETIME_SECONDS,
    )
    check_manifest(manifest, publisher=publisher, run=run)
    return manifest


def check_manifest(
    manifest: Manifest, *, publisher: str, run: str, coordinator_time_seconds: float | None = None
) -> None:
    """Raise SchemaViolation unless the manifest makes sense for this publisher and run; StaleManifest if expired.

    Expiry is judged by the coordinator's clock alone (home clocks are wrong): not at all when it is not known.
    """
    if manifest.publisher != publisher or manifest.run != run:
        raise SchemaViolation(
            f"a manifest of run {manifest.run} by {manifest.publisher}, expected run {run} by {publisher}"
        )
    chunks = chunk_count(manifest.length_bytes, manifest.chunk_bytes)
    if len(manifest.chunk_sha256) != DIGEST_BYTES * chunks:
        raise SchemaViolation(
            f"{manifest.length_bytes} bytes are {chunks} chunks of {manifest.chunk_bytes}, "
            f"but {len(manifest.chunk_sha256)} bytes of hashes came"
        )
    if manifest.kind == "delta" or manifest.codec != "raw" or manifest.anchor_hash:
        raise SchemaViolation(
            f"this version takes whole raw snapshots and adapters, not {manifest.kind} in {manifest.codec}"
        )
    if (manifest.kind == "adapter") != (manifest.base_hash is not None):
        raise SchemaViolation(
            f"a manifest of the kind {manifest.kind} {'without' if manifest.kind == 'adapter' else 'with'} a base"
        )
    if manifest.expires_seconds <= manifest.created_seconds:
        raise SchemaViolation("the manifest expires before it was created")
    if coordinator_time_seconds is not None and coordinator_time_seconds >= manifest.expires_seconds:
        age = coordinator_time_seconds - manifest.expires_seconds
        raise StaleManifest(f"the manifest of version {manifest.version} expired {age:.0f} s ago")


def check_order(manifest: Manifest, manifest_hash: bytes, highest: Accepted | None) -> None:
    """Raise StaleManifest unless the manifest is above the highest accepted one, or is that very one again.

    The same one again is a resumed download; another of the same (epoch, version) is a publisher that forked.
    """
    if highest is None or manifest_hash == highest.manifest_hash:
        return
    if (manifest.epoch, manifest.version) <= (highest.epoch, highest.version):
        raise StaleManifest(
            f"epoch {manifest.epoch} version {manifest.version} is not above "
            f"epoch {highest.epoch} version {highest.version}, which was accepted before"
        )


def accept_manifest(
    signed: Signed,
    *,
    publisher: str,
    run: str,
    highest: Accepted | None,
    coordinator_time_seconds: float | None = None,
) -> tuple[Manifest, bytes]:
    """All checks in their order: the manifest and its hash.

    Raises BadSignature, MalformedFrame, SchemaViolation or StaleManifest.
    """
    manifest = open_signed(signed, publisher, "manifest", Manifest)
    manifest_hash = payload_hash(signed)
    check_manifest(manifest, publisher=publisher, run=run, coordinator_time_seconds=coordinator_time_seconds)
    check_order(manifest, manifest_hash, highest)
    return manifest, manifest_hash


def is_below(older: Manifest, newer: Manifest) -> bool:
    """Both of one publisher and run, and `older` before `newer` in (epoch, version)."""
    same = (older.publisher, older.run) == (newer.publisher, newer.run)
    return same and (older.epoch, older.version) < (newer.epoch, newer.version)


def highest_of(known: Accepted | None, manifest: Manifest, manifest_hash: bytes) -> Accepted:
    """What is recorded after `manifest` was accepted: never lower than before."""
    if known and (known.epoch, known.version) > (manifest.epoch, manifest.version):
        return known
    return Accepted(manifest.epoch, manifest.version, manifest_hash)
