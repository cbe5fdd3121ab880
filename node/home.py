"""The file `join` in a node's home: whom it joined, so that the next start needs no options."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from echo2.p2p.join import JoinString

JOIN_FILE = "join"

log = logging.getLogger(__name__)


def remember_join(home: Path, join: JoinString) -> None:
    """Keep the join string, readable by the owner alone: it carries a token. A disk that takes no more is logged."""
    path = home / JOIN_FILE
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{join}\n")
        temporary.replace(path)
    except OSError as error:
        log.warning("cannot keep the join string in %s: %s; the next start needs --join", path, error.strerror)


def remembered_join(home: Path) -> str:
    """The text kept by an earlier start. Raises ConfigurationError when there is none."""
    path = home / JOIN_FILE
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"the node in {home} has not joined a run yet; start it with --join and the join string you were given"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}; start with --join") from error
