"""The operator's token: shown once when made, kept only as its SHA-256."""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

TOKEN_BYTES = 32
"""256 bits: cannot be guessed, so a fast hash is enough and asking costs no more than it must."""


def make_operator_token(path: Path) -> str:
    """Make a new token, keep its hash in `path` (0600), return it. Raises ConfigurationError when it cannot be kept."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(hashlib.sha256(token.encode()).hexdigest() + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    return token


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
