"""Log lines: one JSON object a record, or one line for people; and what every line is said of, by context.

`tell` names the event, which stays the same when its words change: grep for `"event": "leases_granted"`. `said_of` adds
fields to every line that is logged inside, in tasks started inside too: the id of the request being served, the peer.
A lease is written by the first `LEASE_DIGITS` hex digits of its id, on both sides, so that one can be followed through
the logs of coordinator and node.

Names and reasons of strangers are in messages and fields: whatever they are, a record is one line, its length is
bounded, what is not printable is escaped, and no field can pass for another one.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

LEASE_DIGITS = 12
"""48 bits: among a million leases two are alike once in 500 pools."""

MESSAGE_CHARS_MAX = 4096
FIELD_CHARS_MAX = 512
EXCEPTION_CHARS_MAX = 32 * 1024
LIST_MAX = 64
"""Values of a list shown; the longest is of the leases of one request."""

_context: ContextVar[Mapping[str, Any]] = ContextVar("echo2_log_context", default=MappingProxyType({}))

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName"}

_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+-]+")


@contextmanager
def said_of(**fields: Any) -> Iterator[None]:
    """Every line logged inside has these fields too."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def tell(log: logging.Logger, level: int, event: str, message: str, *args: Any, **fields: Any) -> None:
    """Log `message % args` as an `event`, with fields."""
    log.log(level, message, *args, extra={"event": event, **fields}, stacklevel=2)


def short(lease_id: bytes) -> str:
    """A lease as logs have it."""
    return lease_id.hex()[:LEASE_DIGITS]


def shorts(lease_ids: Iterable[bytes]) -> list[str]:
    """Several."""
    return [short(lease_id) for lease_id in lease_ids]


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, daemon, logger, message, context and `extra` fields, exception."""

    def __init__(self, daemon: str) -> None:
        super().__init__()
        self._daemon = daemon

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": _moment(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "daemon": self._daemon,
            "logger": record.name,
            "message": _cut(record.getMessage(), MESSAGE_CHARS_MAX),
        }
        line = {**_fields(record), **line}  # ours win
        line = {key: line[key] for key in sorted(line, key=_place)}
        if record.exc_info:
            line["exception"] = _cut(self.formatException(record.exc_info), EXCEPTION_CHARS_MAX)
        return printable(json.dumps(line, default=_shown, ensure_ascii=False))


class TextLines(logging.Formatter):
    """For people: time, level, logger, fields in brackets, then the message, which so can pass for none of them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; an exception's lines are set in below it."""
        fields = " ".join(f"{key}={_word(value)}" for key, value in _fields(record).items())
        message = printable(_cut(record.getMessage(), MESSAGE_CHARS_MAX))
        moment = f"{_moment(record):%H:%M:%S}"
        where = record.name.removeprefix("echo2.")
        line = f"{moment} {record.levelname.lower():7} {where} {f'[{fields}] ' if fields else ''}{message}"
        if record.exc_info:
            told = _cut(self.formatException(record.exc_info), EXCEPTION_CHARS_MAX)
            line += "".join(f"\n    | {printable(each)}" for each in told.splitlines())
        return line


def printable(text: str) -> str:
    """With every character that moves a cursor, breaks a line or shows nothing as JSON would escape it.

    Also those that JSON leaves alone: C1 controls, line separators, marks of direction, halves of surrogates.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1].replace("\x7f", "\\u007f") for each in text)


def _moment(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, tz=UTC)


_FIRST = ("time", "level", "daemon", "logger", "event", "message")


def _place(key: str) -> int:
    return _FIRST.index(key) if key in _FIRST else len(_FIRST)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    own = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
    return {key: _bounded(value) for key, value in {**_context.get(), **own}.items()}


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return _cut(value, FIELD_CHARS_MAX)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        more = [f"... {len(value) - LIST_MAX} more"] if len(value) > LIST_MAX else []
        return [_bounded(each) for each in value[:LIST_MAX]] + more
    return value if isinstance(value, int | float | None) else _shown(value)


def _shown(value: Any) -> str:
    return _cut(str(value), FIELD_CHARS_MAX)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... {len(text) - most} characters more"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_word(each) for each in value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else printable(json.dumps(text, ensure_ascii=False))
