"""Who a process is: an Ed25519 key, its libp2p peer id, and signatures under a domain label.

The same key is the transport's (Noise proves it) and signs records; a label keeps a signature made for one purpose
from serving another.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Literal, TypeVar

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .codec import decode_record, encode_record
from .errors import BadSignature, ConfigurationError
from .messages import Record, Signed

if TYPE_CHECKING:
    from pathlib import Path

R = TypeVar("R", bound=Record)

Label = Literal["manifest", "run", "heartbeat", "notice", "plan", "ticket", "receipts", "statement", "chain"]

_PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""identity multihash of the 36-byte protobuf (key type Ed25519, 32 bytes of key): libp2p's peer id for Ed25519."""

_SEED_BYTES = 32

PEER_ID_CHARACTERS_MAX = 64
"""Decoding takes quadratic time: what is longer is no peer id."""

_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
"""The field and the curve of Ed25519 (RFC 8032)."""


class Identity:
    """A private key held in memory. `peer_id` is public and names this process everywhere."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != _SEED_BYTES:
            raise ConfigurationError(f"an identity is {_SEED_BYTES} bytes, got {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.peer_id = peer_id_of(self._key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def sign(self, label: Label, record: Record) -> Signed:
        """Encode once, sign those bytes; whoever verifies sees the same bytes."""
        payload = encode_record(record)
        return Signed(payload=payload, signature=self._key.sign(_domain(label) + payload))


def peer_id_of(public_key: bytes) -> str:
    """libp2p peer id of a raw Ed25519 public key."""
    return base58.b58encode(_PEER_ID_PREFIX + public_key).decode()


def public_key_of(peer_id: str) -> bytes:
    """The 32-byte key inside a peer id. Raises BadSignature when it is not an Ed25519 peer id."""
    try:
        raw = base58.b58decode(peer_id)
    except ValueError as error:
        raise BadSignature(f"{peer_id[:64]!r} is not a peer id") from error
    if len(raw) != len(_PEER_ID_PREFIX) + _SEED_BYTES or not raw.startswith(_PEER_ID_PREFIX):
        raise BadSignature(f"{peer_id[:64]!r} is not an Ed25519 peer id")
    return raw[len(_PEER_ID_PREFIX) :]


def check_peer_id(peer_id: str) -> str:
    """A peer id that a person typed or pasted: also refused when no key has it, as about half of all typing errors are.

    Raises BadSignature.
    """
    y = int.from_bytes(public_key_of(peer_id[:PEER_ID_CHARACTERS_MAX]), "little") % (1 << 255)
    square = (y * y - 1) * (_D * y * y + 1) % _P  # x^2 = (y^2 - 1) / (d y^2 + 1), up to a square
    if len(peer_id) > PEER_ID_CHARACTERS_MAX or y >= _P or pow(square, (_P - 1) // 2, _P) not in (0, 1):
        raise BadSignature(f"{peer_id[:64]!r} is the peer id of no key")
    return peer_id


def open_signed(signed: Signed, signer: str, label: Label, kind: type[R]) -> R:
    """Verify, then parse: the record `signer` (a peer id) signed under `label`.

    Raises BadSignature before a byte of the payload is parsed, then MalformedFrame or SchemaViolation.
    """
    key = Ed25519PublicKey.from_public_bytes(public_key_of(signer))
    try:
        key.verify(signed.signature, _domain(label) + signed.payload)
    except InvalidSignature as error:
        raise BadSignature(f"not signed by {signer} as {label}") from error
    return decode_record(signed.payload, kind)


def payload_hash(signed: Signed) -> bytes:
    """SHA-256 of the exact signed bytes; of a manifest, the manifest hash."""
    return hashlib.sha256(signed.payload).digest()


def load_or_create_identity(path: Path) -> Identity:
    """The key in `path` (32 raw bytes, mode 0600), made on first use.

    Created whole or not at all, so that a crash never leaves a half-written key and never re-mints a name.
    Raises ConfigurationError when the file is unreadable, malformed, or readable by others.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_once(path, os.urandom(_SEED_BYTES))
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise ConfigurationError(f"{path} can be read by others; run: chmod 600 {path}")
        seed = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot use the key file {path}: {error.strerror}") from error
    if len(seed) != _SEED_BYTES:
        raise ConfigurationError(
            f"{path} is not a key file ({len(seed)} bytes, not {_SEED_BYTES}); restore it or move it away"
        )
    return Identity(seed)


def _write_once(path: Path, seed: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    binary = getattr(os, "O_BINARY", 0)  # Windows would write a byte that is a line end as two
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | binary, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(seed)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # fails if another process was first: then its key is the key
        except FileExistsError:
            return
    finally:
        temporary.unlink(missing_ok=True)


def _domain(label: str) -> bytes:
    return f"echo2/{label}/1".encode() + b"\0"
