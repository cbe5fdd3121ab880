from __future__ import annotations

import gzip
import json
from contextlib import closing

import pytest
import sqlalchemy as sa

from echo2.coordinator import accounts, history, schema
from echo2.coordinator.backup import restore_backup, write_backup
from echo2.coordinator.ledger import open_ledger, open_ledger_to_read
from echo2.p2p.errors import ConfigurationError


def back_up(url, path):
    with closing(open_ledger_to_read(url)) as ledger, ledger.reading() as connection:
        return write_backup(connection, path, wall=7.5)


def restore(url, path):
    with closing(open_ledger(url)) as ledger, ledger.transaction() as connection:
        return restore_backup(connection, path)


def contents(url):
    with closing(open_ledger(url)) as ledger, ledger.reading() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(sa.select(table).order_by(*table.primary_key))]
            for table in schema.metadata.sorted_tables
        }


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request, tmp_path):
    """Where to restore: of each kind, so that every backup crosses over too."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'restored.sqlite3'}"
    return request.getfixturevalue("postgresql").database()


async def work_a_little(world, learner, node, tools):
    await learner.hello()
    await learner.publish()
    await node.join()
    await node.work()
    rollouts = []
    while len(rollouts) < 9:
        await node.work(samples=8, wait=5.0)
        rollouts += (await learner.fetch(wait=5.0)).rollouts
    await learner.train(rollouts[:8])


async def test_a_backup_taken_at_work_goes_on_in_either_database(autojump_clock, world, tools, tmp_path, empty_url):
    """Every row is the same; a coordinator begun on it knows what the first one knew, and goes on."""
    path = tmp_path / "backup"
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await work_a_little(world, learner, node, tools)
            made = back_up(world.url, path)
            before = contents(world.url)
            (lease,) = (await node.lease(samples=2)).leases
        assert path.stat().st_mode & 0o777 == 0o600
        restored = restore(empty_url, path)
        assert (restored.rows, restored.made) == (made.rows, 7.5) == (sum(map(len, before.values())), 7.5)
        assert contents(empty_url) == before
        world.database_url = empty_url
        async with world.serving():
            assert world.run.rollouts.consumed == 8
            await node.join(hello=False)
            (ack,) = await node.submit(tools.answer(lease))
            assert "lease" in ack.reason  # it was granted after the backup: nothing knows it
            await node.work(samples=2, wait=5.0)
            await learner.publish(version=1)
        with closing(open_ledger(empty_url)) as ledger, ledger.reading() as connection:
            assert accounts.verify(connection).fault == ""
            assert history.replay(history.read_bodies(connection)) == history.read_state(connection)


@pytest.fixture
def filled(database_url, tmp_path):
    """A ledger with a few rows, and its backup."""
    with closing(open_ledger(database_url)) as ledger:
        ledger.secret(b"s" * 32)
        with ledger.transaction() as connection:
            entry = accounts.Entry("r", "p" * 44, "credit", "credit", 5, 1, "a", "bytes \x01 and ünïcode")
            accounts.append(connection, [entry] * 3, wall=1.0)
    path = tmp_path / "backup"
    back_up(database_url, path)
    return path


def is_empty(url):
    with closing(open_ledger(url)) as ledger, ledger.reading() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(schema.postings)) == 0


@pytest.fixture
def target(tmp_path):
    return f"sqlite:///{tmp_path / 'target.sqlite3'}"


def lines(path):
    return gzip.decompress(path.read_bytes()).splitlines(keepends=True)


def rewrite(path, content):
    path.write_bytes(gzip.compress(b"".join(content)))


def altered(line):
    return line.replace(b"r", b"q") if b'["postings",[1' in line else line


DAMAGES = {
    "a line is missing": lambda found: found[:3] + found[4:],
    "a line is twice there": lambda found: found[:4] + found[3:],
    "the end is missing": lambda found: found[:-1],
    "more follows the end": lambda found: [*found, b"[]\n"],
    "a value is another": lambda found: [altered(line) for line in found],
    "a line is no JSON": lambda found: [*found[:3], b"[garbage\n", *found[3:]],
    "a table that we have not": lambda found: [*found[:3], b'["songs","columns",["title"]]\n', *found[3:]],
    "a row is too short": lambda found: [*found[:3], b'["meta",["x"]]\n', *found[3:]],
}


@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_backup_restores_nothing(filled, target, damage):
    """Whatever is wrong with it, the database is as empty as before."""
    rewrite(filled, damage(lines(filled)))
    with pytest.raises(ConfigurationError, match=r"is damaged: .*; nothing was restored"):
        restore(target, filled)
    assert is_empty(target)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_backup_that_was_cut_off_restores_nothing(filled, target, share):
    """A full disk, a copy that was interrupted."""
    content = filled.read_bytes()
    filled.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigurationError, match="is damaged"):
        restore(target, filled)
    assert is_empty(target)


@pytest.mark.slow_on_postgresql
def test_any_flipped_bit_is_found(filled, target):
    """In each part of the file."""
    content = filled.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 40)):
        if 4 <= place < 10:
            continue  # gzip's time, flags of its speed and system say nothing of the contents
        filled.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        with pytest.raises(ConfigurationError):
            restore(target, filled)
        assert is_empty(target)


def test_a_foreign_file_is_refused(tmp_path, target):
    """Text, another program's archive, nothing at all, no file."""
    path = tmp_path / "foreign"
    for content in (
        b"",
        b"hello",
        gzip.compress(b"hello\n"),
        gzip.compress(b'{"format": "songs/1"}\n'),
        gzip.compress(b""),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError):
            restore(target, path)
    with pytest.raises(ConfigurationError, match="there is no backup"):
        restore(target, tmp_path / "missing")
    assert is_empty(target)


def test_a_backup_of_another_release_is_refused(filled, target):
    """It says which version the backup has, and which is known here."""
    first, *rest = lines(filled)
    rewrite(filled, [json.dumps(json.loads(first) | {"schema": 99}).encode() + b"\n", *rest])
    with pytest.raises(ConfigurationError, match="of schema version 99, this software knows"):
        restore(target, filled)


def test_only_an_empty_database_takes_one(filled, database_url):
    """Nothing is merged, and nothing overwritten."""
    with pytest.raises(ConfigurationError, match="the database is not empty"):
        restore(database_url, filled)


def test_a_backup_overwrites_no_file(filled, database_url, tmp_path):
    """And one that cannot be written leaves nothing behind."""
    with pytest.raises(ConfigurationError, match="is already there"):
        back_up(database_url, filled)
    with pytest.raises(ConfigurationError, match="cannot write the backup"):
        back_up(database_url, tmp_path / "missing" / "backup")
    assert not list(tmp_path.glob("*.tmp"))
