"""The coordinator's memory: one SQL database (`database`), and what happens when it cannot be used.

What a peer was told is durable had its transaction committed first. A database that cannot be written just now (disk
full, locked, gone) refuses the request that needed it, with a time to come again; nothing in memory has changed then,
because services change memory only after the commit.

| a database that           | means                                                                                    |
|---------------------------|------------------------------------------------------------------------------------------|
| refuses a statement       | the transaction is undone; the next one is tried                                         |
| cannot be reached         | the same; it is asked again after 0.5 s, then after twice as long, up to 15 s            |
| goes away while a commit  | nobody knows whether it holds: `in_doubt`. Nothing is recorded until whoever keeps the   |
| is on its way             | ledger's contents in memory has read them again (`CoordinatorService`)                   |
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    InvalidRequestError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from echo2.p2p.errors import ConfigurationError, ProtocolError, Refused

from . import migrations, schema
from .database import (
    BUSY_SECONDS,
    check_durable,
    lock_for_writing,
    make_engine,
    make_reading_engine,
    said_by,
    shown,
    sqlite_url,
)
from .measures import LedgerMeasures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Ledger", "LedgerUnavailable", "open_ledger", "open_ledger_to_read", "sqlite_url"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""When a refused asker should come again: a disk is freed by people, not in milliseconds."""

RECONNECT_SECONDS_FIRST = 0.5
RECONNECT_SECONDS_MAX = 15.0
"""Between two attempts to reach a server, each of which may hold everything up for `database.CONNECT_SECONDS`."""

SECRET_BYTES = 32

PROBE_BYTES_MIN = 64 * 1024
PROBE_BYTES_MAX = 16 << 20
"""What `Ledger.probe` writes: as much as the transaction that failed, within these. A full disk still takes small ones:
at least some pages, at most what one submission brings."""

VALUE_BYTES = 16
"""What a number costs in a row, rounded up."""

LONG_KINDS = frozenset({bytes, memoryview, str})
"""What may be longer."""

PROBE_KEY = "probe"

DAMAGED = (
    "stop the coordinator, then restore a backup of it, or move it away to begin a new ledger (all records are lost)"
)
"""What a person can do about a ledger whose pages or cells are not as they were written."""

DAMAGE_CHARS_MAX = 160
"""Of what was found wrong: it may quote what it found."""

_NOT_AS_WRITTEN = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What code raises that meets a value it never wrote."""

AWAY = "its database does not answer; it tries again by itself"
"""What strangers are told: what the server says names hosts and users."""


class LedgerUnavailable(Refused):
    """The request was not recorded, and so not acknowledged; it may be sent again."""

    def __init__(self, detail: str) -> None:
        super().__init__("ledger_unavailable", f"the coordinator cannot write its ledger: {detail}", RETRY_SECONDS)


class DatabaseAway(ConfigurationError):
    """The server cannot be reached, or another coordinator has the database: it may pass by itself."""


class Ledger:
    """An open ledger. `trouble` says why a transaction failed, until one at least as large has succeeded."""

    def __init__(self, engine: sa.Engine, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._name = name
        self._clock = clock
        self._remote = engine.dialect.name != "sqlite"
        self._bytes = 0
        self._refused_bytes = 0
        self._failures = 0
        self._retry_at = float("-inf")
        self._probing = False
        self.trouble = ""
        self.measures = LedgerMeasures()
        self.in_doubt = False
        """A commit may or may not hold. Set to False by whoever has read everything again."""
        sa.event.listen(engine, "before_cursor_execute", self._measure)

    def _must_be_settled(self) -> None:
        """Refuse while a commit may or may not hold; `probe` is how that ends."""
        if self.in_doubt and not self._probing:
            raise LedgerUnavailable(AWAY)

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """All or nothing, durable on leaving. Raises LedgerUnavailable, and then nothing was recorded (or `in_doubt`).

        Raises Refused for values that the database cannot hold.
        """
        self._must_be_settled()
        self._bytes = 0
        try:
            with self._connected() as connection:
                try:
                    yield connection
                except BaseException:
                    with suppress(DBAPIError, InvalidRequestError):
                        connection.rollback()
                    raise
                self._commit(connection)
        except (IntegrityError, ProgrammingError):
            raise  # a defect of ours, not of the disk
        except (DataError, UnicodeEncodeError) as error:  # bytes of a command line that are no text in its encoding
            raise Refused("unrecordable", "it holds a value that the ledger cannot record") from error
        except (DBAPIError, UnicodeDecodeError) as error:
            if not _is_busy(error) and not self._lost(error):
                self._refused_bytes = max(self._refused_bytes, self._bytes)
            raise self._unavailable(error) from error
        self._failures = 0
        if self._bytes >= self._refused_bytes:
            self._refused_bytes = 0
            self.trouble = ""

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection to read with. Raises LedgerUnavailable."""
        self._must_be_settled()
        try:
            with self._connected() as connection:
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

    @contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        if self._clock() < self._retry_at:
            raise LedgerUnavailable(AWAY)
        try:
            connection = self._engine.connect()
        except (DBAPIError, PoolTimeout) as error:
            if isinstance(error, DBAPIError) and not self._remote:
                raise
            raise self._gone(said_by(error)) from error
        with connection:
            yield connection

    def _commit(self, connection: sa.Connection) -> None:
        begun = self._clock()
        try:
            connection.commit()
        except DBAPIError as error:
            self.in_doubt = self._lost(error)
            raise
        self.measures.commits.observe(self._clock() - begun)

    def _lost(self, error: DBAPIError | UnicodeDecodeError) -> bool:
        """Whether it says that the server, not the statement, is at fault."""
        return self._remote and isinstance(error, DBAPIError) and error.connection_invalidated

    def _gone(self, said: str) -> LedgerUnavailable:
        """It cannot be reached: nobody asks it for a while."""
        seconds = min(RECONNECT_SECONDS_FIRST * 2.0**self._failures, RECONNECT_SECONDS_MAX)
        self._failures = min(self._failures + 1, 10)
        self._retry_at = self._clock() + seconds
        self._say(f"the database {self._name} cannot be reached: {said}")
        return LedgerUnavailable(AWAY)

    def _unavailable(self, error: DBAPIError | UnicodeDecodeError) -> LedgerUnavailable:
        if self._lost(error):
            return self._gone(said_by(error))
        trouble = said_by(error)
        if _is_damaged(error):
            trouble = f"{self._name or 'the file'} is damaged ({trouble}); {DAMAGED}"
        self._say(trouble)
        return LedgerUnavailable(AWAY if self._remote else trouble)

    def _say(self, trouble: str) -> None:
        self.measures.failures += 1
        if trouble != self.trouble:  # `probe` fails twice a second: said once
            log.warning("the ledger refused a transaction: %s", trouble)
        self.trouble = trouble

    def _measure(
        self, _connection: Any, _cursor: Any, _statement: str, parameters: Any, _context: Any, executemany: bool
    ) -> None:
        """Count what a transaction writes, roughly: the values of its statements."""
        total = 0
        for row in parameters if executemany else (parameters,):
            values = row.values() if isinstance(row, dict) else row or ()
            total += VALUE_BYTES * len(values)
            for value in values:
                if type(value) in LONG_KINDS:
                    total += len(value)
                elif type(value) is list:
                    total += sum(len(each) if type(each) in LONG_KINDS else VALUE_BYTES for each in value)
        self._bytes += total

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
        self._probing = True
        try:
            with self.transaction() as connection:
                connection.execute(drop)
                content = bytes(max(self._refused_bytes, PROBE_BYTES_MIN))
                connection.execute(sa.insert(schema.meta).values(key=PROBE_KEY, value=content))
            with self.transaction() as connection:
                connection.execute(drop)
        finally:
            self._probing = False

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


class RetiredLedger(Ledger):
    """Stands where a ledger was whose contents in memory are no longer true: it takes and gives nothing."""

    def __init__(self) -> None:
        self._probing = False
        self.trouble = ""
        self.in_doubt = True


def open_ledger(
    url: str,
    *,
    busy_seconds: float = BUSY_SECONDS,
    password: str | None = None,
    exclusive: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Ledger:
    """Open or create the ledger at a database URL; tables of an older release are brought up to date.

    `exclusive`: for the coordinator that serves. Raises ConfigurationError when it cannot be used; DatabaseAway, which
    is one too, when that may pass.
    """
    try:
        engine = make_engine(url, busy_seconds=busy_seconds, password=password, exclusive=exclusive)
        with engine.begin() as connection, _not_as_written(shown(url)):
            _adopt(connection, url)
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigurationError(f"{url!r} is not a database URL that works here: {error}") from error
    except ModuleNotFoundError as error:
        raise _no_driver(url, error) from error
    except (DBAPIError, UnicodeDecodeError) as error:
        hint = f"; {DAMAGED}" if _is_damaged(error) else ""
        kind = DatabaseAway if _is_away(error) else ConfigurationError
        raise kind(f"the ledger {shown(url)} cannot be used: {said_by(error)}{hint}") from error
    except OSError as error:
        raise ConfigurationError(f"the ledger {shown(url)} cannot be used: {error.strerror}") from error
    return Ledger(engine, shown(url), clock)


def open_ledger_to_read(url: str, *, password: str | None = None) -> Ledger:
    """A ledger for reading only, beside a coordinator that may be writing it.

    Raises ConfigurationError when there is none, or one of another version.
    """
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).is_file():
        raise ConfigurationError(f"there is no ledger {parsed.database}; a coordinator makes it when it starts")
    try:
        engine = make_reading_engine(url, password=password)
        with engine.connect() as connection, _not_as_written(shown(url)):
            found = _version(connection, set(sa.inspect(connection).get_table_names()), url)
    except ModuleNotFoundError as error:
        raise _no_driver(url, error) from error
    except (DBAPIError, UnicodeDecodeError) as error:
        hint = f"; {DAMAGED}" if _is_damaged(error) else ""
        raise ConfigurationError(f"the ledger {shown(url)} cannot be read: {said_by(error)}{hint}") from error
    if found < schema.SCHEMA_VERSION:
        raise ConfigurationError(f"the ledger {shown(url)} is of an older release; start the coordinator once, first")
    return Ledger(engine, shown(url))


def _adopt(connection: sa.Connection, url: str) -> None:
    """Make the tables in an empty database, or bring those of an older release up to date, and prove that it can be
    written."""
    check_durable(connection)
    lock_for_writing(connection)
    present = set(sa.inspect(connection).get_table_names())
    if not present:
        schema.metadata.create_all(connection)
        connection.execute(sa.insert(schema.meta).values(key="schema_version", value=b"%d" % schema.SCHEMA_VERSION))
        return
    found = _version(connection, present, url)
    if found < schema.SCHEMA_VERSION:
        log.warning("%s is brought from schema version %d to %d", shown(url), found, schema.SCHEMA_VERSION)
    migrations.upgrade(connection, found)


def _version(connection: sa.Connection, present: set[str], url: str) -> int:
    """The recorded version of the tables, one that this software can use. Raises ConfigurationError."""
    version = schema.meta.c.key == "schema_version"
    recorded = connection.scalar(sa.select(schema.meta.c.value).where(version)) if "meta" in present else None
    if recorded is None:
        raise ConfigurationError(f"{shown(url)} is a database of something else; name another one")
    said = bytes(recorded)[:16].decode(errors="replace")
    found = int(said) if said.isdecimal() else 0
    if not migrations.FIRST_VERSION <= found <= schema.SCHEMA_VERSION:
        raise ConfigurationError(
            f"the ledger {shown(url)} has schema version {said}, this software knows {schema.SCHEMA_VERSION}; "
            "use the software that made it, or begin a new ledger"
        )
    return found


def _is_away(error: DBAPIError | UnicodeDecodeError) -> bool:
    starting_up = "57P03"
    from_afar = isinstance(error, OperationalError) and hasattr(error.orig, "sqlstate")
    return from_afar and _sqlstate(error) in {None, starting_up}


def _no_driver(url: str, error: ModuleNotFoundError) -> ConfigurationError:
    return ConfigurationError(f"the ledger {shown(url)} needs a driver: pip install 'echo2[postgresql]' ({error})")


@contextmanager
def _not_as_written(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the ledger {name} is damaged ({said_by(error)}); {DAMAGED}") from error


def _is_damaged(error: DBAPIError | UnicodeDecodeError) -> bool:
    if isinstance(error, UnicodeDecodeError) or "decode to UTF-8" in said_by(error):
        return True
    return _sqlite_name(error).startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _is_busy(error: DBAPIError | UnicodeDecodeError) -> bool:
    lock_not_available = "55P03"
    return _sqlstate(error) == lock_not_available or _sqlite_name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _sqlstate(error: DBAPIError | UnicodeDecodeError) -> str | None:
    return getattr(getattr(error, "orig", None), "sqlstate", None)


def _sqlite_name(error: DBAPIError | UnicodeDecodeError) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlite_errorname", ""))
