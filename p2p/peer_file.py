"""Bans and back-off in a small file of the state folder, so that a restart forgets neither.

A file that is damaged, or was written under a wrong clock, costs its contents and nothing else: the transport starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .guards import BACK_OFF_SECONDS_MAX, BAN_SECONDS_MAX, RECORDS_MAX, BackOff, Ban, Bans, Failing

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

PEER_FILE = "peers.json"

FILE_BYTES_MAX = 32 * 1024 * 1024
"""Above what the largest allowed contents take; more is not ours."""

_Text = Annotated[str, Field(max_length=256)]
_Seconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=2**31)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    peer: _Text


class _Ban(_Row):
    until: _Seconds
    reason: _Text
    times: _Count


class _Failing(_Row):
    addresses: Annotated[tuple[_Text, ...], Field(max_length=16)]
    failures: _Count
    failed_at: _Seconds
    retry_at: _Seconds


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    bans: Annotated[tuple[_Ban, ...], Field(max_length=RECORDS_MAX)] = ()
    failing: Annotated[tuple[_Failing, ...], Field(max_length=RECORDS_MAX)] = ()


def recall(path: Path, bans: Bans, back_off: BackOff, now: float) -> None:
    """Put what the file says into `bans` and `back_off`; nothing when there is none or it is damaged."""
    try:
        with path.open("rb") as file:
            found = _File.model_validate_json(file.read(FILE_BYTES_MAX + 1)[:FILE_BYTES_MAX])
    except FileNotFoundError:
        return
    except (OSError, ValidationError, ValueError) as error:
        log.warning("%s cannot be used, bans and back-off start anew: %s", path, str(error).partition("\n")[0])
        return
    for ban in found.bans:
        if ban.until <= now + BAN_SECONDS_MAX:
            bans.recall(Ban(ban.peer, ban.until, ban.reason, ban.times))
    for row in found.failing:
        if row.failed_at <= now and row.retry_at <= now + BACK_OFF_SECONDS_MAX:
            back_off.recall(Failing(row.peer, row.addresses, row.failures, row.failed_at, row.retry_at))


Rows = tuple[list[Ban], list[Failing]]
"""What to write: records that do not change any more, so that another thread may encode them."""


def rows(bans: Bans, back_off: BackOff, now: float) -> Rows:
    """What a restart must not forget."""
    return bans.remembered(now), back_off.remembered(now)


def encoded(found: Rows) -> bytes:
    """The file. Without indentation: that is done in Python, and held the process up for 0.2 s at 4,096 bans."""
    bans, failing = found
    file = {"format": 1, "bans": [vars(ban) for ban in bans], "failing": [vars(failed) for failed in failing]}
    return json.dumps(file, separators=(",", ":")).encode()


def replace_by(path: Path, found: Rows) -> OSError | None:
    """Encode and `write`; for a thread."""
    return write(path, encoded(found))


def write(path: Path, data: bytes) -> OSError | None:
    """Replace the file: a reader, also one after a crash, sees the old or the new one.

    Returns why it could not be: a disk that is full or was made read-only costs the file, never the process.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the disk refuses this as well
            temporary.unlink(missing_ok=True)
        return error
    return None
