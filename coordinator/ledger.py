"""The coordinator's memory: one SQL database, SQLite in WAL mode with synchronous=FULL unless the URL says otherwise.

What a peer was told is durable had its transaction committed first. A database that cannot be written just now (disk
full, locked, gone) refuses the request that needed it, with a time to come again; nothing in memory has changed then,
because services change memory only after the commit.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, ProgrammingError
from sqlalchemy.pool import NullPool, StaticPool

from echo2.p2p.daemon import keep_private
from echo2.p2p.errors import ConfigurationError, ProtocolError, Refused

from . import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.5
"""How long a statement waits for another process's lock. It stalls every request, and the asker comes again anyway."""

READ_BUSY_SECONDS = 10.0
"""As long as a reader waits: it stalls nobody but itself."""

RETRY_SECONDS = 5.0
"""When a refused asker should come again: a disk is freed by people, not in milliseconds."""

SECRET_BYTES = 32

PROBE_BYTES_MIN = 64 * 1024
PROBE_BYTES_MAX = 16 << 20
"""What `Ledger.probe` writes: as much as the transaction that failed, within these. A full disk still takes small ones:
at least some pages, at most what one submission brings."""

VALUE_BYTES = 16
"""What a number costs in a row, rounded up."""

PROBE_KEY = "probe"

DAMAGED = (
    "stop the coordinator, then restore a backup of it, or move it away to begin a new ledger (all records are lost)"
)
"""What a person can do about a ledger whose pages or cells are not as they were written."""

DAMAGE_CHARS_MAX = 160
"""Of what was found wrong: it may quote what it found."""

_NOT_AS_WRITTEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What code raises that meets a value it never wrote."""


class LedgerUnavailable(Refused):
    """The request was not recorded, and so not acknowledged; it may be sent again."""

    def __init__(self, detail: str) -> None:
        super().__init__("ledger_unavailable", f"the coordinator cannot write its ledger: {detail}", RETRY_SECONDS)


def sqlite_url(path: Path) -> str:
    """The URL of a ledger in a file."""
    return f"sqlite:///{path}"


class Ledger:
    """An open ledger. `trouble` says why a transaction failed, until one at least as large has succeeded."""

    def __init__(self, engine: sa.Engine, name: str = "") -> None:
        self._engine = engine
        self._name = name
        self._bytes = 0
        self._refused_bytes = 0
        self.trouble = ""
        sa.event.listen(engine, "before_cursor_execute", self._measure)

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """All or nothing, durable on leaving. Raises LedgerUnavailable, and then nothing was recorded."""
        self._bytes = 0
        try:
            with self._engine.begin() as connection:
                yield connection
        except (IntegrityError, ProgrammingError):
            raise  # a defect of ours, not of the disk
        except (DBAPIError, UnicodeDecodeError) as error:
            if not _is_busy(error):
                self._refused_bytes = max(self._refused_bytes, self._bytes)
            raise self._unavailable(error) from error
        if self._bytes >= self._refused_bytes:
            self._refused_bytes = 0
            self.trouble = ""

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection to read with. Raises LedgerUnavailable."""
        try:
            with self._engine.connect() as connection:
                yield connection
        except (DBAPIError, UnicodeDecodeError) as error:
            raise self._unavailable(error) from error

    @contextmanager
    def loading(self, table: sa.Table) -> Iterator[None]:
        """Around taking rows of a table into memory. Raises ConfigurationError if they are not as they were written."""
        try:
            yield
        except (ProtocolError, *_NOT_AS_WRITTEN) as error:
            raise self._damaged(table, str(error) or type(error).__name__) from error

    def _damaged(self, table: sa.Table, what: str) -> ConfigurationError:
        what = " ".join(what.split())[:DAMAGE_CHARS_MAX]
        return ConfigurationError(
            f"the ledger {self._name or 'in use'} is damaged: its table {table.name} holds what was "
            f"never written there ({what}); {DAMAGED}"
        )

    def _unavailable(self, error: DBAPIError | UnicodeDecodeError) -> LedgerUnavailable:
        trouble = _said(error)
        if _is_damaged(error):
            trouble = f"{self._name or 'the file'} is damaged ({trouble}); {DAMAGED}"
        if trouble != self.trouble:  # `probe` fails twice a second: said once
            log.warning("the ledger refused a transaction: %s", trouble)
        self.trouble = trouble
        return LedgerUnavailable(trouble)

    def _measure(
        self, _connection: Any, _cursor: Any, _statement: str, parameters: Any, _context: Any, executemany: bool
    ) -> None:
        """Count what a transaction writes, roughly: the values of its statements."""
        for row in parameters if executemany else (parameters,):
            values = row.values() if isinstance(row, dict) else row or ()
            self._bytes += sum(
                len(value) if isinstance(value, str | bytes | memoryview) else VALUE_BYTES for value in values
            )

    def secret(self, fresh: bytes) -> bytes:
        """The key of all seeds of this coordinator: the recorded one, or `fresh`, recorded now."""
        with self.transaction() as connection, self.loading(schema.meta):
            found = connection.scalar(sa.select(schema.meta.c.value).where(schema.meta.c.key == "secret"))
            if found is not None:
                if len(found) != SECRET_BYTES:
                    raise self._damaged(schema.meta, f"the secret has {len(found)} bytes, not {SECRET_BYTES}")
                return bytes(found)
            if connection.scalar(sa.select(schema.leases.c.id).limit(1)) is not None:
                raise self._damaged(schema.meta, "the secret is gone, of which the seeds of all leases were made")
            assert len(fresh) == SECRET_BYTES, "a secret of this length"
            connection.execute(sa.insert(schema.meta).values(key="secret", value=fresh))
        return fresh

    def probe(self) -> None:
        """Write as much as was refused, then drop it, to see whether the trouble is over. Raises LedgerUnavailable.

        It is committed: SQLite keeps what is rolled back in memory, and would find no fault with the disk.
        """
        drop = sa.delete(schema.meta).where(schema.meta.c.key == PROBE_KEY)
        self._refused_bytes = min(self._refused_bytes, PROBE_BYTES_MAX)
        with self.transaction() as connection:
            connection.execute(drop)
            content = bytes(max(self._refused_bytes, PROBE_BYTES_MIN))
            connection.execute(sa.insert(schema.meta).values(key=PROBE_KEY, value=content))
        with self.transaction() as connection:
            connection.execute(drop)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


def open_ledger(url: str, *, busy_seconds: float = BUSY_SECONDS) -> Ledger:
    """Open or create the ledger at a database URL. Raises ConfigurationError when it cannot be used."""
    try:
        engine = _engine(url, busy_seconds)
        with engine.begin() as connection, _not_as_written(_shown(url)):
            _adopt(connection, url)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigurationError(f"{url!r} is not a database URL that works here: {error}") from error
    except (DBAPIError, UnicodeDecodeError) as error:
        hint = f"; {DAMAGED}" if _is_damaged(error) else ""
        raise ConfigurationError(f"the ledger {_shown(url)} cannot be used: {_said(error)}{hint}") from error
    except OSError as error:
        raise ConfigurationError(f"the ledger {_shown(url)} cannot be used: {error.strerror}") from error
    return Ledger(engine, _shown(url))


def open_ledger_to_read(path: Path) -> Ledger:
    """The ledger in a file, for reading only, beside a coordinator that may be writing it.

    Raises ConfigurationError when there is none, or one of another version.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no ledger {path}; a coordinator makes it when it starts")

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=READ_BUSY_SECONDS)

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)
    try:
        with engine.connect() as connection, _not_as_written(str(path)):
            _check_version(connection, str(path))
    except (DBAPIError, UnicodeDecodeError) as error:
        hint = f"; {DAMAGED}" if _is_damaged(error) else ""
        raise ConfigurationError(f"the ledger {path} cannot be read: {_said(error)}{hint}") from error
    return Ledger(engine)


def _engine(url: str, busy_seconds: float) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return sa.create_engine(url, pool_pre_ping=True)
    options: dict[str, Any] = {"connect_args": {"timeout": busy_seconds}}
    if parsed.database in (None, "", ":memory:"):
        options["poolclass"] = StaticPool
    elif not str(parsed.database).startswith("file:"):
        keep_private(Path(str(parsed.database)))  # it holds the key of all seeds, and whom the operator knows
    engine = sa.create_engine(url, **options)

    @sa.event.listens_for(engine, "connect")
    def _durable(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")  # NORMAL may lose the last commits in a power cut: acknowledged ones
        cursor.close()

    return engine


def _adopt(connection: sa.Connection, url: str) -> None:
    """Check the schema's version, create the tables in an empty database, and prove that it can be written."""
    if not sa.inspect(connection).get_table_names():
        schema.metadata.create_all(connection)
        connection.execute(sa.insert(schema.meta).values(key="schema_version", value=b"%d" % schema.SCHEMA_VERSION))
        return
    found = _check_version(connection, url)
    connection.execute(sa.update(schema.meta).where(schema.meta.c.key == "schema_version").values(value=found))


def _check_version(connection: sa.Connection, url: str) -> bytes:
    """The schema's version as recorded: this software's. Raises ConfigurationError."""
    present = set(sa.inspect(connection).get_table_names())
    version = schema.meta.c.key == "schema_version"
    found = connection.scalar(sa.select(schema.meta.c.value).where(version)) if "meta" in present else None
    if found is None:
        raise ConfigurationError(f"{_shown(url)} is a database of something else; name another file")
    if bytes(found) != b"%d" % schema.SCHEMA_VERSION:
        raise ConfigurationError(
            f"the ledger {_shown(url)} has schema version {bytes(found)[:16].decode(errors='replace')}, this software "
            f"knows {schema.SCHEMA_VERSION}; use the software that made it, or begin a new ledger"
        )
    return bytes(found)


@contextmanager
def _not_as_written(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the ledger {name} is damaged ({_said(error)}); {DAMAGED}") from error


def _said(error: Exception) -> str:
    """What the database said. SQLite quotes what it found in a damaged schema, and Python takes that for UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        return error.object.decode(errors="replace")
    return str(error.orig if isinstance(error, DBAPIError) else error)


def _is_damaged(error: DBAPIError | UnicodeDecodeError) -> bool:
    if isinstance(error, UnicodeDecodeError) or "decode to UTF-8" in _said(error):
        return True
    return _sqlite_name(error).startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _is_busy(error: DBAPIError | UnicodeDecodeError) -> bool:
    return _sqlite_name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _sqlite_name(error: DBAPIError | UnicodeDecodeError) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlite_errorname", ""))


def _shown(url: str) -> str:
    if "://" not in url:
        return url
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return parsed.database or "in memory"
    return parsed.render_as_string(hide_password=True)
