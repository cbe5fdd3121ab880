from __future__ import annotations

from contextlib import closing, contextmanager

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from echo2.coordinator import history, migrations, records, schema
from echo2.coordinator.ledger import open_ledger
from echo2.p2p.errors import ConfigurationError


@contextmanager
def raw(url):
    """The database without our software around it."""
    engine = sa.create_engine(url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


ROLLOUT = "'peer', 'train', 0, 0,"
REST = "NULL, NULL, NULL, 4.5, NULL, NULL,"


def old_ledger(url):
    """A ledger as the release before wrote it: version 2, with a token, a node, a lease and two events."""
    with raw(url) as connection:
        migrations.create_first(connection)
        for statement in (
            "INSERT INTO nodes VALUES ('peer', 'node', 'n', 's', '[]', 'suspended', 'odd rewards', 1.5, 2.5)",
            "INSERT INTO leases VALUES (1, 'r', 'l', 'peer', 'train', 0, 0, 2, 0, 'm', 4, 60.0, 3.5)",
            f"INSERT INTO rollouts VALUES (1, 'r', 'l', 0, {ROLLOUT} 'held', '', 'stop', 'm', 'm', 'm', {REST} NULL)",
            f"INSERT INTO rollouts VALUES (2, 'r', 'l', 1, {ROLLOUT} 'rejected', 'x', 'stop', :e, :e, :e, {REST} 1)",
            "INSERT INTO events (wall, actor, action, subject, reason) VALUES (1.0, 'a', 'first', '', '')",
            "INSERT INTO events (wall, actor, action, subject, reason) VALUES (2.0, 'a', 'second', '', '')",
        ):
            connection.execute(
                sa.text(statement.replace("'l'", ":l").replace("'m'", ":m")), {"l": b"l", "m": b"mmmm", "e": b""}
            )


def differences(url):
    with raw(url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return compare_metadata(context, schema.metadata)


def test_every_step_has_a_version():
    """None is missing between the oldest ledger and today's."""
    assert list(migrations.STEPS) == list(range(migrations.FIRST_VERSION + 1, schema.SCHEMA_VERSION + 1))


def test_the_steps_lead_to_todays_tables(database_url):
    """alembic finds no difference between an upgraded database and the tables that the software declares."""
    with raw(database_url) as connection:
        migrations.create_first(connection)
        migrations.upgrade(connection, migrations.FIRST_VERSION)
    assert differences(database_url) == []


def test_a_new_ledger_has_todays_tables(database_url):
    """What is made in an empty database is the same."""
    open_ledger(database_url).close()
    assert differences(database_url) == []


def test_an_old_ledger_is_brought_up_to_date_when_it_is_opened(database_url, caplog):
    """Its rows are kept, it is said, and the log begins with what was there."""
    old_ledger(database_url)
    with closing(open_ledger(database_url)) as ledger:
        assert f"from schema version 2 to {schema.SCHEMA_VERSION}" in caplog.text
        with ledger.reading() as connection:
            assert [row.action for row in records.list_events(connection, limit=9)] == ["second", "first"]
            state = history.read_state(connection)
            assert state["nodes"]["peer",]["reason"] == "odd rewards"
            assert [entry.tokens for entry in records.load_unfinished(connection, "r")] == [b"mmmm"]
            assert sorted(state["rollouts"]) == [(1,), (2,)]
            assert state["leases"][b"l",]["ended"] is None
            assert history.replay(history.read_bodies(connection)) == state
    caplog.clear()
    open_ledger(database_url).close()
    assert caplog.text == ""


def test_an_upgrade_that_fails_changes_nothing(database_url, monkeypatch):
    """The tables, the rows and the version are as before: it can be tried again."""

    def breaks(op):
        migrations._log_and_postings(op)
        raise sa.exc.OperationalError("x", {}, Exception("the power failed"))

    old_ledger(database_url)
    with monkeypatch.context() as patched:
        patched.setitem(migrations.STEPS, 3, breaks)
        with pytest.raises(ConfigurationError, match="the power failed"):
            open_ledger(database_url)
    with raw(database_url) as connection:
        assert connection.scalar(sa.text("SELECT value FROM meta WHERE key = 'schema_version'")) == b"2"
        assert not sa.inspect(connection).has_table("postings")
    open_ledger(database_url).close()
    assert differences(database_url) == []


@pytest.mark.parametrize("version", [b"1", b"%d" % (schema.SCHEMA_VERSION + 1), b"99", b"?"])
def test_other_versions_are_refused(database_url, version):
    """Tables of later software, or of one too old, are left as they are."""
    open_ledger(database_url).close()
    with raw(database_url) as connection:
        table = schema.meta
        connection.execute(sa.update(table).where(table.c.key == "schema_version").values(value=version))
    with pytest.raises(ConfigurationError, match=f"schema version {version.decode()}".replace("?", r"\?")):
        open_ledger(database_url)
