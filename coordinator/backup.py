"""Backups of the ledger: one file, taken while the coordinator works, put back into an empty database of either kind.

    file     gzip of lines of JSON
    first    {"format": "echo2/backup/1", "schema": 3, "made": unix seconds}
    rows     ["table", [value, ...]], in the order of the tables and of their keys; bytes are {"b": base64}
    columns  ["table", "columns", [name, ...]] before a table's first row
    last     {"rows": count, "sha256": of every line before it}

All of it is read in one transaction: it is of one moment. It holds whatever the ledger holds, the key of all seeds
included: mode 0600. Restoring is one transaction too: a file that is cut off, damaged or of something else leaves the
database empty.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from echo2.p2p.errors import ConfigurationError

from . import schema
from .database import is_sqlite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORMAT = "echo2/backup/1"

ROWS = 200
"""Read and written at once: of rollouts, a few megabytes."""

LINE_BYTES_MAX = 256 << 20
"""Above any row's; a file of something else must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What a file holds."""

    rows: int
    made: float
    schema_version: int


def write_backup(connection: sa.Connection, path: Path, *, wall: float) -> Backup:
    """Write everything that `connection`, made for reading only, sees to a new file, whole or not at all.

    Raises ConfigurationError.
    """
    if path.exists():
        raise ConfigurationError(f"{path} is already there; name a new file")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        try:
            with os.fdopen(descriptor, "wb") as raw:
                with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1, filename="", mtime=0) as file:
                    made = _write(connection, file, wall)
                raw.flush()
                os.fsync(raw.fileno())
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write the backup {path}: {error.strerror}") from error
    return made


def _write(connection: sa.Connection, file: gzip.GzipFile, wall: float) -> Backup:
    digest = hashlib.sha256()
    count = 0

    def line(content: Any) -> None:
        data = json.dumps(content, separators=(",", ":"), default=_bytes_out).encode() + b"\n"
        digest.update(data)
        file.write(data)

    line({"format": FORMAT, "schema": schema.SCHEMA_VERSION, "made": wall})
    for table in schema.metadata.sorted_tables:
        line([table.name, "columns", table.columns.keys()])
        query = sa.select(table).order_by(*table.primary_key).execution_options(yield_per=ROWS)
        for row in connection.execute(query):
            line([table.name, list(row)])
            count += 1
    file.write(json.dumps({"rows": count, "sha256": digest.hexdigest()}).encode() + b"\n")
    return Backup(count, wall, schema.SCHEMA_VERSION)


def restore_backup(connection: sa.Connection, path: Path) -> Backup:
    """Fill the tables of a database that was empty, in the caller's transaction. Raises ConfigurationError."""
    for table in schema.metadata.sorted_tables:
        present = sa.select(sa.func.count()).select_from(table)
        if table is not schema.meta and connection.scalar(present):
            raise ConfigurationError("the database is not empty; name an empty one to restore a backup into")
    try:
        with gzip.open(path, "rb") as file:
            return _restore(connection, path, file)
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no backup {path}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise ConfigurationError(f"cannot read the backup {path}: {error.strerror or error}") from error


def _restore(connection: sa.Connection, path: Path, file: gzip.GzipFile) -> Backup:
    digest, count, last = hashlib.sha256(), 0, None
    head = file.readline(4096)
    facts = _parsed(path, head)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ConfigurationError(f"{path} is not a backup of a ledger")
    version = facts.get("schema")
    if version != schema.SCHEMA_VERSION:
        raise ConfigurationError(
            f"{path} is a backup of schema version {version}, this software knows {schema.SCHEMA_VERSION}; restore it "
            "with the release that made it, then open it with this one"
        )
    digest.update(head)
    connection.execute(sa.delete(schema.meta))
    for table, rows, lines in _chunks(path, file):
        if table is None:
            last = rows[0]
            break
        for line in lines:
            digest.update(line)
        if rows:
            connection.execute(sa.insert(table), rows)
        count += len(rows)
    if last is None or file.read(1):
        raise _damaged(path, "it was cut off" if last is None else "there is more behind its end")
    if last != {"rows": count, "sha256": digest.hexdigest()}:
        raise _damaged(path, "its contents do not have its hash")
    _continue_numbers(connection)
    return Backup(count, float(facts["made"]), version)


def _chunks(path: Path, file: gzip.GzipFile) -> Iterator[tuple[sa.Table | None, list[dict[str, Any]], list[bytes]]]:
    """Rows of one table at a time, with the lines they are of; at last None with the last line."""
    table: sa.Table | None = None
    columns: list[str] = []
    rows: list[dict[str, Any]] = []
    lines: list[bytes] = []
    while line := file.readline(LINE_BYTES_MAX):
        content = _parsed(path, line)
        match content:
            case dict():
                if table is not None:
                    yield table, rows, lines
                yield None, [content], []
                return
            case [str(name), "columns", [*names]]:
                if table is not None:
                    yield table, rows, lines
                table = schema.metadata.tables.get(name)
                if table is None or names != table.columns.keys():
                    raise _damaged(path, f"it has another table {name!r}")
                columns, rows, lines = list(names), [], [line]
            case [str(name), [*values]] if table is not None and name == table.name and len(values) == len(columns):
                rows.append(dict(zip(columns, (_bytes_in(path, value) for value in values), strict=True)))
                lines.append(line)
                if len(rows) == ROWS:
                    yield table, rows, lines
                    rows, lines = [], []
            case _:
                raise _damaged(path, "a line is none of a backup's")


def _continue_numbers(connection: sa.Connection) -> None:
    """New rows are numbered behind the restored ones. SQLite does it by itself."""
    if is_sqlite(connection):
        return
    for table in schema.metadata.sorted_tables:
        column = table.autoincrement_column
        if column is not None:
            sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
            highest = sa.select(sa.func.max(column)).scalar_subquery()
            connection.execute(sa.select(sa.func.setval(sequence, sa.func.coalesce(highest, 1), highest.is_not(None))))


def _parsed(path: Path, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        if line.startswith((b"{", b"[")):
            raise _damaged(path, "a line is no JSON") from error
        raise ConfigurationError(f"{path} is not a backup of a ledger") from error


def _bytes_out(value: Any) -> dict[str, str]:
    return {"b": base64.b64encode(bytes(value)).decode()}


def _bytes_in(path: Path, value: Any) -> Any:
    try:
        return base64.b64decode(value["b"], validate=True) if isinstance(value, dict) else value
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "a value is no base64") from error


def _damaged(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"the backup {path} is damaged: {why}; nothing was restored")
