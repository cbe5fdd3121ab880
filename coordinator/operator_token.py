"""The operator's token: shown once when made, kept only as its SHA-256. And the token of this machine's own commands,
which the coordinator makes anew each time it starts: in a file of the state folder, as private as the key beside it."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN_BYTES = 32
"""256 bits: cannot be guessed, so a fast hash is enough and asking costs no more than it must."""


def make_operator_token(path: Path) -> str:
    """Make a new token, keep its hash in `path` (0600), return it. Raises ConfigurationError when it cannot be kept."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    _write_private(path, hashlib.sha256(token.encode()).hexdigest())
    return token


@contextmanager
def local_token(path: Path) -> Iterator[bytes]:
    """A token in `path` (0600) for as long as this process serves: the SHA-256 of it. Raises ConfigurationError."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    _write_private(path, token)
    try:
        yield hashlib.sha256(token.encode()).digest()
    finally:
        path.unlink(missing_ok=True)


def _write_private(path: Path, line: str) -> None:
    """A file of one line that only its owner can read, whole or not at all. Raises ConfigurationError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error


def load_operator_token_hash(path: Path) -> bytes:
    """The 32 bytes that `api.Gate` compares with. Raises ConfigurationError when there is none or it is damaged."""
    try:
        digest = bytes.fromhex(path.read_text(encoding="ascii"))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no operator's token ({path} is missing); make one: echo2-coordinator token operator"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if len(digest) != hashlib.sha256().digest_size:
        raise ConfigurationError(f"{path} is damaged; make a new one: echo2-coordinator token operator")
    return digest
