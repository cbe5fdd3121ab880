"""Small files in a node's home: whom it joined and as what (`join`, `name`), so that the next start needs no options;
and `home-mark`, by which the coordinator knows a restart from a second machine."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import Name
from echo2.p2p.settings import read_text

from .commands import command_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from echo2.p2p.join import JoinString

JOIN_FILE = "join"
NAME_FILE = "name"
MARK_FILE = "home-mark"

MARK_BYTES = 16

NAME_BYTES_MAX = 1024
"""Above any name; a damaged file is not read whole."""

_NAME: TypeAdapter[str] = TypeAdapter(Name)

log = logging.getLogger(__name__)


def remember_join(home: Path, join: JoinString) -> None:
    """Keep the join string, readable by the owner alone: it carries a token. A disk that takes no more is logged."""
    path = home / JOIN_FILE
    try:
        _keep(path, f"{join}\n")
    except OSError as error:
        log.warning("cannot keep the join string in %s: %s; the next start needs --join", path, error.strerror)


def remember_name(home: Path, name: str) -> None:
    """Keep what the node is called. A disk that takes no more is logged."""
    path = home / NAME_FILE
    try:
        _keep(path, f"{name}\n")
    except OSError as error:
        log.warning("cannot keep the node's name in %s: %s; the next start needs --name", path, error.strerror)


def _keep(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def remembered_join(home: Path) -> str:
    """The text kept by an earlier start. Raises ConfigurationError when there is none."""
    path = home / JOIN_FILE
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"the node in {home} has not joined a run yet; start it with --join and the join string you were given, "
            f"as in `{command_line('run', home)} --join @join.txt`"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}; start with --join") from error


def remembered_name(home: Path) -> str | None:
    """What the node was called at an earlier start; None when it has not been said. Raises ConfigurationError."""
    path = home / NAME_FILE
    if not path.exists():
        return None
    name = read_text(path, "node's name", bytes_max=NAME_BYTES_MAX).strip()
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        raise ConfigurationError(f"{path} does not hold a node's name; say it again with --name") from error


def home_mark(home: Path, entropy: Callable[[int], bytes]) -> bytes | None:
    """What tells this folder from a copy of it: a secret that holds only in the very file it was first written to.

    The folder's lock lets one node at a time run in it, so a node that starts with the mark of the one before proves
    that that one is gone. A copy has the file under another inode, and gets a mark of its own. None when the disk takes
    none: then the coordinator waits until the process before is silent.
    """
    path = home / MARK_FILE
    with suppress(OSError, LookupError, TypeError, ValueError), path.open(encoding="ascii") as file:
        kept = json.loads(file.read(NAME_BYTES_MAX))
        mark = bytes.fromhex(kept["mark"])
        if kept["inode"] == os.fstat(file.fileno()).st_ino and len(mark) == MARK_BYTES:
            return mark
    mark = entropy(MARK_BYTES)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(json.dumps({"mark": mark.hex(), "inode": os.fstat(file.fileno()).st_ino}))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        log.warning(
            "cannot keep a mark in %s: %s; after a crash the pool takes longer to have us", path, error.strerror
        )
        return None
    return mark
