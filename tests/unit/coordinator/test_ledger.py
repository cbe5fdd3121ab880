from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress

import pytest
import sqlalchemy as sa

from echo2.coordinator import records, schema
from echo2.coordinator.ledger import LedgerUnavailable, open_ledger, sqlite_url
from echo2.p2p.errors import ConfigurationError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite3"


def add_event(ledger, reason="x"):
    with ledger.transaction() as connection:
        records.add_event(connection, wall=1.0, actor="a", action="b", reason=reason)


def add_events(ledger, count):
    with ledger.transaction() as connection:
        for _ in range(count):
            records.add_event(connection, wall=1.0, actor="a", action="b", reason="x" * 500)


def add_large(ledger, length_bytes):
    with ledger.transaction() as connection:
        connection.execute(sa.delete(schema.meta).where(schema.meta.c.key == "large"))
        connection.execute(sa.insert(schema.meta).values(key="large", value=bytes(length_bytes)))


def arrive(connection, entry):
    changes = records.arrived_rollouts("r", [records.Verdict(entry, "held")], wall=1.0)
    records.record(connection, changes, wall=1.0, actor="peer", action="rollouts arrived", kind="flow")


def events(ledger):
    with ledger.reading() as connection:
        return [row.reason for row in records.list_events(connection, limit=10)]


def test_nobody_else_can_read_the_seeds(path, caplog):
    """The file and its -wal and -shm are 0600 from the first byte; those of an older release are mended, and said."""
    url = sqlite_url(path)
    before = os.umask(0)
    try:
        with closing(open_ledger(url)) as ledger:
            ledger.secret(bytes(32))
            modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert modes == {path.name: 0o600, f"{path.name}-wal": 0o600, f"{path.name}-shm": 0o600}
    path.chmod(0o644)
    open_ledger(url).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "could be read by others" in caplog.text


def test_sqlite_is_opened_for_durability(path):
    """WAL, and synchronous=FULL (2): a commit is on the disk before it returns."""
    with closing(open_ledger(sqlite_url(path))) as ledger, ledger.reading() as connection:
        assert connection.scalar(sa.text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(sa.text("PRAGMA synchronous")) == 2


def test_what_was_committed_is_there_when_opened_again(path):
    """A ledger outlives its process."""
    with closing(open_ledger(sqlite_url(path))) as ledger:
        add_event(ledger, "first")
        secret = ledger.secret(b"s" * 32)
    with closing(open_ledger(sqlite_url(path))) as ledger:
        assert events(ledger) == ["first"]
        assert ledger.secret(b"t" * 32) == secret


def test_a_failed_transaction_leaves_nothing(path):
    """All or nothing."""
    with closing(open_ledger(sqlite_url(path))) as ledger:
        with suppress(KeyError), ledger.transaction() as connection:
            records.add_event(connection, wall=1.0, actor="a", action="b")
            raise KeyError
        assert events(ledger) == []


def test_an_unknown_schema_version_is_refused(path):
    """A ledger of later software is never guessed at."""
    with closing(open_ledger(sqlite_url(path))):
        pass
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (b"99",))
    with pytest.raises(ConfigurationError, match="schema version 99, this software knows"):
        open_ledger(sqlite_url(path))


def test_a_database_of_something_else_is_refused(path):
    """Our tables are not put among another program's."""
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(ConfigurationError, match="a database of something else"):
        open_ledger(sqlite_url(path))


def test_a_file_that_is_no_database_is_refused(path):
    """One line, no traceback."""
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(ConfigurationError, match="cannot be used: file is not a database"):
        open_ledger(sqlite_url(path))


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    """The folder does not exist."""
    with pytest.raises(ConfigurationError, match="cannot be used: No such file or directory"):
        open_ledger(sqlite_url(tmp_path / "missing" / "ledger.sqlite3"))


def test_a_url_that_is_none_is_refused():
    """A typing mistake in the settings."""
    with pytest.raises(ConfigurationError, match="not a database URL that works here"):
        open_ledger("nonsense")


def test_a_full_disk_refuses_and_recovers(path):
    """SQLite says full: LedgerUnavailable with a time to come again, the trouble on show, and later all is well."""
    with closing(open_ledger(sqlite_url(path))) as ledger:
        add_event(ledger, "before")
        with ledger.reading() as connection:
            pages = connection.scalar(sa.text("PRAGMA page_count"))
            connection.execute(sa.text(f"PRAGMA max_page_count = {pages}"))
        with pytest.raises(LedgerUnavailable) as refused:
            add_events(ledger, 200)
        assert refused.value.retry_seconds == 5.0
        assert "full" in ledger.trouble
        with ledger.reading() as connection:
            connection.execute(sa.text("PRAGMA max_page_count = 1000000"))
        add_event(ledger, "after")
        ledger.probe()
        assert (ledger.trouble, events(ledger)) == ("", ["after", "before"])
        with ledger.reading() as connection:
            assert set(connection.scalars(sa.select(schema.meta.c.key))) == {"schema_version"}


def test_a_full_disk_stays_in_sight_though_small_writes_succeed(path):
    """Until as much as was refused can be written, by a request or by the probe, the trouble is shown."""
    with closing(open_ledger(sqlite_url(path))) as ledger:
        add_event(ledger)

        def room(pages):
            with ledger.reading() as connection:
                connection.execute(sa.text(f"PRAGMA max_page_count = {pages}"))

        with ledger.reading() as connection:
            pages = connection.scalar(sa.text("PRAGMA page_count"))
        room(pages + 40)  # 160 KiB: the smallest probe would find room
        with pytest.raises(LedgerUnavailable):
            add_large(ledger, 200_000)
        for _ in range(3):
            add_event(ledger, "small")
            assert "full" in ledger.trouble
            with pytest.raises(LedgerUnavailable):
                ledger.probe()
            assert "full" in ledger.trouble
        room(1_000_000)
        ledger.probe()
        assert ledger.trouble == ""
        room(pages + 40)
        with pytest.raises(LedgerUnavailable):
            add_large(ledger, 400_000)
        room(1_000_000)
        add_large(ledger, 400_000)
        assert ledger.trouble == ""


def damage(path):
    """Overwrite all pages but the first, as a failing disk does."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))


def test_a_ledger_with_damaged_pages_names_itself_and_says_what_to_do(path):
    """At start, and when a page is first read while running."""
    with closing(open_ledger(sqlite_url(path))) as ledger:
        add_event(ledger)
    with closing(open_ledger(sqlite_url(path))) as ledger:
        damage(path)
        with pytest.raises(LedgerUnavailable) as refused:
            events(ledger)
        assert str(path) in refused.value.detail
        assert "restore a backup" in ledger.trouble
    with pytest.raises(ConfigurationError, match=r"ledger\.sqlite3 cannot be used: .*; stop .*restore a backup"):
        open_ledger(sqlite_url(path))


def test_a_locked_ledger_refuses_and_recovers(path):
    """Another program holds the lock: refused after a short wait, not for ever."""
    with closing(open_ledger(sqlite_url(path), busy_seconds=0.01)) as ledger:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerUnavailable, match="locked"):
                add_event(ledger)
            other.execute("ROLLBACK")
        add_event(ledger, "after")
        assert events(ledger) == ["after"]


def test_a_rollout_is_unique_by_run_lease_and_sample(path):
    """The database itself refuses a second one."""
    entry = records.RolloutEntry(1, b"l" * 16, 0, "peer", "train", 0, 0, "held", "", "stop", b"", b"")
    with closing(open_ledger(sqlite_url(path))) as ledger:
        with ledger.transaction() as connection:
            arrive(connection, entry)
        entry.id = 2
        with pytest.raises(sa.exc.IntegrityError), ledger.transaction() as connection:
            arrive(connection, entry)
        with ledger.reading() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(schema.rollouts)) == 1


def test_unfinished_rollouts_are_found_by_their_index(path):
    """A restart reads the held and admitted ones, not the whole history."""
    with closing(open_ledger(sqlite_url(path))) as ledger, ledger.reading() as connection:
        query = sa.text(
            "EXPLAIN QUERY PLAN SELECT * FROM rollouts WHERE run = 'r' AND state IN ('held', 'admitted') ORDER BY id"
        )
        assert "rollouts_unfinished" in str(connection.execute(query).all())
