"""The operator's token: shown once when made, kept only as its SHA-256. And the token of this machine's own commands,
which the coordinator makes anew each time it starts: in a file of the state folder, as private as the key beside it."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN_BYTES = 32
"""256 bits: cannot be guessed, so a fast hash is enough and asking costs no more than it must."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def make_operator_token(path: Path) -> str:
    """Make a new token, keep its hash in `path` (0600), return it. Raises ConfigurationError when it cannot be kept."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    _write_private(path, hashlib.sha256(token.encode()).hexdigest())
    return token


class NoRoom(ConfigurationError):
    """The disk is full: that may pass, and then the same will do."""


class LocalToken:
    """A token for this machine's own commands, and its file, once that could be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = secrets.token_urlsafe(TOKEN_BYTES)
        self.digest = hashlib.sha256(self._token.encode()).digest()

    def write(self) -> str:
        """Make the file; why that could not be done on a full disk, else nothing. Raises ConfigurationError."""
        try:
            _write_private(self._path, self._token)
        except NoRoom as error:
            return str(error)
        return ""


@contextmanager
def local_token(path: Path) -> Iterator[LocalToken]:
    """A token that is in `path` (0600) from when it is written for as long as this process serves."""
    try:
        yield LocalToken(path)
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
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # else the next attempt would find it, and a full disk has no room for it
        kind = NoRoom if error.errno in _FULL else ConfigurationError
        raise kind(f"cannot write {path}: {error.strerror}") from error


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
