"""Which manifests are accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.chunks import hash_bytes
from echo2.p2p.errors import BadSignature, SchemaViolation, StaleManifest
from echo2.p2p.identity import Identity, payload_hash
from echo2.p2p.manifest import LIFETIME_SECONDS, accept_manifest, check_order, highest_of, is_below, make_manifest
from echo2.p2p.messages import Manifest
from echo2.p2p.store import Accepted

LEARNER = Identity(b"L" * 32)
OTHER = Identity(b"O" * 32)


def manifest(epoch: int = 0, version: int = 0, **changes: object) -> Manifest:
    made = make_manifest(
        hash_bytes(bytes(100_000)),
        run="r",
        publisher=LEARNER.peer_id,
        epoch=epoch,
        version=version,
        domain="f16",
        previous_hash=None,
        created_seconds=1000.0,
    )
    return made.model_copy(update=changes)


def accept(made: Manifest, *, signer: Identity = LEARNER, highest: Accepted | None = None, now: float | None = None):
    signed = signer.sign("manifest", made)
    return accept_manifest(signed, publisher=LEARNER.peer_id, run="r", highest=highest, coordinator_time_seconds=now)


def test_good() -> None:
    """A consistent manifest by the publisher is accepted, with the hash of its exact bytes."""
    made = manifest(1, 2)
    accepted, manifest_hash = accept(made, now=1000.0)
    assert accepted == made
    assert manifest_hash == payload_hash(LEARNER.sign("manifest", made))


def test_another_key() -> None:
    """A manifest signed by another key is refused before it is read, even if it names the right publisher."""
    with pytest.raises(BadSignature):
        accept(manifest(), signer=OTHER)


def test_another_label() -> None:
    """A signature the publisher made for another purpose does not serve as one of a manifest."""
    signed = LEARNER.sign("plan", manifest())
    with pytest.raises(BadSignature):
        accept_manifest(signed, publisher=LEARNER.peer_id, run="r", highest=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "another"},
        {"publisher": OTHER.peer_id},
        {"chunk_sha256": bytes(32)},
        {"chunk_sha256": bytes(96)},
        {"chunk_sha256": bytes(33)},
        {"length_bytes": 10**9},
        {"kind": "delta"},
        {"codec": "zstd"},
        {"base_hash": bytes(32)},
        {"kind": "adapter"},
        {"kind": "adapter", "base_hash": bytes(32), "anchor_hash": bytes(32)},
        {"expires_seconds": 1000.0},
    ],
)
def test_inconsistent(changes: dict[str, object]) -> None:
    """Another run or publisher, a wrong number of hashes, or a form this version cannot take is refused."""
    with pytest.raises(SchemaViolation):
        accept(manifest(**changes))


def test_an_adapter_names_its_base() -> None:
    """The hash of a whole snapshot's manifest; without one, or a whole snapshot with one, it makes no sense."""
    accept(manifest(kind="adapter", base_hash=bytes(32)))


def test_expiry_by_the_coordinators_clock() -> None:
    """A manifest expires by the coordinator's time; when that is not known it is not judged at all."""
    accept(manifest(), now=1000.0 + LIFETIME_SECONDS - 1)
    accept(manifest(), now=None)
    with pytest.raises(StaleManifest, match="expired"):
        accept(manifest(), now=1000.0 + LIFETIME_SECONDS)


orders = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(orders, orders)
def test_order(known: tuple[int, int], new: tuple[int, int]) -> None:
    """Only a manifest above the highest is accepted: epoch first, then version."""
    highest = Accepted(*known, manifest_hash=b"k" * 32)
    if new > known:
        check_order(manifest(*new), b"n" * 32, highest)
    else:
        with pytest.raises(StaleManifest):
            check_order(manifest(*new), b"n" * 32, highest)


def test_same_again() -> None:
    """The highest accepted manifest itself is accepted again: that is how an interrupted download resumes."""
    check_order(manifest(1, 5), b"k" * 32, Accepted(1, 5, b"k" * 32))
    check_order(manifest(0, 0), b"n" * 32, None)


def test_resumed_epoch() -> None:
    """A resumed learner's manifest is above every version of the epoch before, and an older one is below it."""
    assert is_below(manifest(0, 9), manifest(1, 4))
    assert not is_below(manifest(1, 4), manifest(0, 9))
    assert not is_below(manifest(0, 0, run="another"), manifest(1, 4))


@given(orders, orders)
def test_highest_never_falls(known: tuple[int, int], new: tuple[int, int]) -> None:
    """What is recorded as highest is the higher of the two."""
    highest = highest_of(Accepted(*known, manifest_hash=b"k" * 32), manifest(*new), b"n" * 32)
    assert (highest.epoch, highest.version) == max(known, new)
