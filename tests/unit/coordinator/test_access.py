"""Access tokens in the ledger, of each kind of database."""

from __future__ import annotations

import hashlib
import random
from contextlib import closing

import pytest
import sqlalchemy as sa

from echo2.coordinator import history, schema
from echo2.coordinator.access import AccessBook
from echo2.coordinator.ledger import LedgerUnavailable, open_ledger
from echo2.coordinator.records import list_events
from echo2.p2p.errors import Refused

OWN = {"operator": hashlib.sha256(b"own").digest()}


def digest(token):
    return hashlib.sha256(token.encode()).digest()


class Clock:
    wall = 1_000.0

    def __call__(self):
        return self.wall


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book(database_url, clock):
    with closing(open_ledger(database_url)) as ledger:
        yield AccessBook(ledger, own=OWN, wall=clock, entropy=random.Random(3).randbytes)


def create(book, name, role="viewer", expires_seconds=None):
    return book.create(name, role, expires_seconds=expires_seconds, actor="operator", reason="asked")


def test_a_token_counts_until_it_expires_or_is_revoked(book, clock):
    """Found by its hash, with its role; then why it counts no more."""
    ann, bob = create(book, "ann", "researcher", expires_seconds=60.0), create(book, "bob")
    assert (book.find(digest(ann)).name, book.find(digest(ann)).role) == ("ann", "researcher")
    assert book.find(digest("own")).role == "operator"
    assert book.find(digest("no token")) == "unknown"
    clock.wall += 59.9
    assert book.find(digest(ann)).name == "ann"
    clock.wall += 0.1
    assert book.find(digest(ann)) == "expired"
    assert book.revoke("bob", actor="operator", reason="left").name == "bob"
    assert book.find(digest(bob)) == "revoked"
    with pytest.raises(KeyError):
        book.revoke("bob", actor="operator", reason="again")


def test_what_is_no_text_is_refused_in_words(book):
    """Bytes of a command line in another encoding, as Python has them: no traceback, and no token."""
    with pytest.raises(Refused, match="cannot record"):
        book.create("ann", "viewer", expires_seconds=None, actor="operator", reason="caf\udce9")
    with pytest.raises(Refused, match="cannot record"):
        book.revoke("caf\udce9", actor="operator", reason="left")
    assert book.rows() == []


def test_a_name_has_one_token_that_counts(book, clock):
    """It is what the audit log calls its holder. Once it counts no more the name is free."""
    create(book, "ann", expires_seconds=10.0)
    with pytest.raises(Refused, match="'ann' has a token that counts"):
        create(book, "ann")
    clock.wall += 10.0
    create(book, "ann", "operator")
    book.revoke("ann", actor="operator", reason="rotated")
    create(book, "ann")
    assert sorted((row.role, row.revoked is None) for row in book.rows()) == [
        ("operator", False),
        ("viewer", True),
        ("viewer", True),
    ]
    for name in ("operator", "coordinator"):
        with pytest.raises(Refused, match="choose another"):
            create(book, name)


def test_the_ledger_holds_no_token_and_tells_all_of_it_again(book, database_url):
    """Only hashes, each change on record with who and why; replay of the log gives the table."""
    token = create(book, "ann", "operator")
    book.revoke("ann", actor="bob", reason="left")
    with closing(open_ledger(database_url)) as ledger, ledger.reading() as connection:
        told, tables = history.replay(history.read_bodies(connection)), history.read_state(connection)
        assert told == tables
        assert tables["access"][digest(token),]["revoked"] == 1_000.0
        said = [(row.actor, row.action, row.subject, row.reason) for row in list_events(connection, limit=9)]
        rows = [bytes(body) for body in connection.scalars(sa.select(schema.events.c.body))]
    assert said == [
        ("bob", "access revoked", "ann", "left"),
        ("operator", "access given", "ann: operator", "asked"),
    ]
    assert not [body for body in rows if token.encode() in body]


def test_while_the_database_is_away_known_tokens_are_known_for_a_while(book, clock, monkeypatch):
    """Whoever was good ten minutes ago may see what is the matter; nobody new may, and an expiry still counts."""
    ann, bob, new = create(book, "ann"), create(book, "bob", expires_seconds=300.0), create(book, "new")
    book.find(digest(ann)), book.find(digest(bob))

    def away():
        raise LedgerUnavailable("away")

    monkeypatch.setattr(book._ledger, "reading", away)
    assert book.find(digest(ann)).name == "ann"
    assert book.find(digest("own")).role == "operator"
    with pytest.raises(LedgerUnavailable):
        book.find(digest(new))
    clock.wall += 301.0
    assert book.find(digest(bob)) == "expired"
    clock.wall += 300.0
    with pytest.raises(LedgerUnavailable):
        book.find(digest(ann))
