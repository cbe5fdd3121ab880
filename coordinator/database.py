"""Which database, and how it is opened: SQLite in a file beside the key, or PostgreSQL by its address.

| what must hold            | SQLite                       | PostgreSQL                                         |
|---------------------------|------------------------------|----------------------------------------------------|
| a commit is on the disk   | WAL, synchronous = FULL      | synchronous_commit = on; fsync = off is refused    |
| one coordinator at a time | the lock of the state folder | an advisory lock, held by its only connection      |
| nobody waits for ever     | BUSY_SECONDS                 | time-outs of connecting, of statements, of locks   |
| nobody else reads it      | mode 0600                    | the server's own matter                            |

The advisory lock does more: whoever has it knows that no earlier connection of this coordinator can still commit.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, StaticPool

from echo2.p2p.daemon import keep_private
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import read_text

BUSY_SECONDS = 0.5
"""How long a statement waits for another process's lock. It stalls every request, and the asker comes again anyway."""

READ_BUSY_SECONDS = 10.0
"""As long as a reader waits: it stalls nobody but itself."""

CONNECT_SECONDS = 2
"""The least that libpq takes. While it lasts nobody is answered, so it is tried seldom (`Ledger`)."""

STATEMENT_SECONDS = 20.0
"""A statement of ours takes milliseconds; a server that is silent so long is treated as gone."""

ADVISORY_LOCK = 0x6563686F32
"""Of the coordinator that uses this database ("echo2")."""

WRITE_LOCK = ADVISORY_LOCK + 1
"""Of whoever makes or changes the tables, or appends to the chain of postings."""

DRIVER = "postgresql+psycopg"

PASSWORD_BYTES_MAX = 4096

IN_USE = "another coordinator uses this database; stop it first, or name another database"


def sqlite_url(path: Path) -> str:
    """The URL of a ledger in a file."""
    return f"sqlite:///{path}"


def is_sqlite(connection: sa.Connection) -> bool:
    """Whether it is SQLite's SQL that this connection takes."""
    return connection.dialect.name == "sqlite"


def check_database_url(url: str) -> None:
    """Raise ValueError, in words that do not repeat it, unless it is a PostgreSQL address without a password."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.drivername not in {"postgresql", DRIVER}:
        raise ValueError(
            f"database must be {DRIVER}://USER@HOST/NAME, or left out for SQLite in the state folder"
        ) from None
    if parsed.password is not None or "password" in parsed.query:
        raise ValueError("take the password out of database; into a file that database_password_file names")


def read_password(path: Path | None) -> str | None:
    """The first line of a password file. Raises ConfigurationError."""
    if path is None:
        return None
    lines = read_text(path, "password file", bytes_max=PASSWORD_BYTES_MAX).splitlines()
    if not lines or not lines[0]:
        raise ConfigurationError(f"the password file {path} is empty; write the database's password into it")
    return lines[0]


def make_engine(
    url: str, *, busy_seconds: float = BUSY_SECONDS, password: str | None = None, exclusive: bool = False
) -> sa.Engine:
    """An engine to write with. `exclusive`: for a coordinator that serves, the only one. Raises OSError."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return _postgresql(parsed, busy_seconds, password, exclusive)
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


def make_reading_engine(url: str, *, password: str | None = None) -> sa.Engine:
    """An engine that cannot write: what one connection reads is of one moment."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        engine = _postgresql(parsed, READ_BUSY_SECONDS, password, exclusive=False, reading=True)
        return engine.execution_options(isolation_level="REPEATABLE READ")
    path = Path(str(parsed.database))

    def connect() -> sqlite3.Connection:
        address = f"{path.absolute().as_uri()}?mode=ro"
        return sqlite3.connect(address, uri=True, timeout=READ_BUSY_SECONDS, isolation_level=None)

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @sa.event.listens_for(engine, "begin")
    def _at_one_moment(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")  # the driver would let each SELECT see a moment of its own

    return engine


def _postgresql(
    url: sa.URL, busy_seconds: float, password: str | None, exclusive: bool, reading: bool = False
) -> sa.Engine:
    settings = {
        "synchronous_commit": "on",
        "lock_timeout": f"{busy_seconds * 1000:.0f}",
        "tcp_keepalives_idle": "10",  # else a server notices hours later that our machine lost its power, and the lock
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
    }
    if reading:
        settings["default_transaction_read_only"] = "on"
    else:
        settings["statement_timeout"] = f"{STATEMENT_SECONDS * 1000:.0f}"
        settings["idle_in_transaction_session_timeout"] = f"{STATEMENT_SECONDS * 1000:.0f}"
    arguments: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "application_name": "echo2-coordinator",
        "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": int(STATEMENT_SECONDS * 1000),
    }
    if password is not None:
        arguments["password"] = password
    engine = sa.create_engine(
        url.set(drivername=DRIVER),
        connect_args=arguments,
        pool_size=1,
        max_overflow=0 if exclusive else 1,
        pool_timeout=busy_seconds,
        pool_pre_ping=True,
        hide_parameters=True,  # an error's text is shown and logged; rows hold hashes of tokens
    )
    if exclusive:

        @sa.event.listens_for(engine, "connect")
        def _alone(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("SELECT pg_try_advisory_lock(%s)", (ADVISORY_LOCK,))
            (alone,) = cursor.fetchone()
            cursor.close()
            connection.commit()
            if not alone:
                connection.close()
                raise engine.dialect.loaded_dbapi.OperationalError(IN_USE)

    return engine


def lock_for_writing(connection: sa.Connection) -> None:
    """Until the transaction ends, nobody else makes tables or appends postings."""
    if is_sqlite(connection):
        raw: Any = connection.connection.driver_connection
        if not raw.in_transaction:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(WRITE_LOCK)))


def check_durable(connection: sa.Connection) -> None:
    """Refuse a server that says "done" before it is. Raises ConfigurationError."""
    if not is_sqlite(connection) and connection.scalar(sa.text("SHOW fsync")) != "on":
        raise ConfigurationError(
            "the PostgreSQL server runs with fsync = off: a power cut would lose what nodes were told is safe; "
            "set fsync = on and restart it"
        )


def said_by(error: Exception) -> str:
    """What the database said, in one line. SQLite quotes a damaged schema, and Python then takes that for UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        said = error.object.decode(errors="replace")
    else:
        said = str(error.orig if isinstance(error, DBAPIError) else error)
    return " ".join(said.split())


def shown(url: str) -> str:
    """A database for people: a file's path, or an address without its password."""
    if "://" not in url:
        return url
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return parsed.database or "in memory"
    return parsed.render_as_string(hide_password=True)
