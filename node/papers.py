"""What a node's owner may need against the coordinator: signed statements, and appeals with what became of them.

A file of its own beside the spool, `papers.sqlite`, so that `echo2-node appeal` can put an appeal into it while the
node runs, and so that nothing that happens to it costs rollouts. What a method has returned survives `kill -9`.
Statements keep the coordinator's signed bytes, for good.

| an appeal is | when                                                                          |
|--------------|-------------------------------------------------------------------------------|
| unsent       | it was put here; the node sends it, until it is taken                         |
| open         | the coordinator has it on record; the node asks now and then what became of it |
| upheld       | the operator agrees; an adjustment may have come of it                        |
| refused      | the operator does not                                                         |
| declined     | the coordinator did not take it, for good; the answer says why                |
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from echo2.p2p.daemon import keep_private
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import Signed

from .spool import SpoolFull

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from echo2.p2p.messages import AppealReply
    from echo2.p2p.postings import Statement

BUSY_SECONDS = 5.0
"""Longest wait for the other process, which writes a row at a time."""

UNSENT_MAX = 64
"""Appeals that wait here: above it somebody's script has gone wrong."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS statements (
    signer TEXT NOT NULL, after INTEGER NOT NULL, last INTEGER NOT NULL, payload BLOB NOT NULL, signature BLOB NOT NULL,
    PRIMARY KEY (signer, after)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS appeals (
    number INTEGER PRIMARY KEY AUTOINCREMENT, appeal_id BLOB NOT NULL UNIQUE, coordinator TEXT NOT NULL,
    run TEXT NOT NULL, subject TEXT NOT NULL, text TEXT NOT NULL, state TEXT NOT NULL, answer TEXT NOT NULL,
    posting INTEGER
);
"""


@dataclass(frozen=True, slots=True)
class Appeal:
    """One appeal as it is kept here."""

    appeal_id: bytes
    coordinator: str
    run: str
    subject: str
    text: str
    state: str = "unsent"
    answer: str = ""
    posting: int | None = None


_COLUMNS = "appeal_id, coordinator, run, subject, text, state, answer, posting"


class Papers:
    """One file; `":memory:"` lives as long as the object: for simulations.

    Every method raises SpoolFull, or ConfigurationError for a file that is damaged; made, only the latter.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        try:
            with self._told():
                if not isinstance(path, str):
                    keep_private(path)
                self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.executescript(_SCHEMA)
        except SpoolFull as error:
            raise ConfigurationError(str(error)) from error

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    # statements

    def last_posting(self, signer: str) -> int:
        """The newest posting of this coordinator's that is kept here; 0 for none."""
        with self._told():
            query = "SELECT MAX(last) FROM statements WHERE signer = ?"
            return int(self._db.execute(query, (signer,)).fetchone()[0] or 0)

    def keep_statement(self, signer: str, signed: Signed, statement: Statement) -> None:
        """Keep a page. An empty one takes the place of the empty one before it: it says where the chain ended since."""
        last = statement.postings[-1].id if statement.postings else statement.after
        with self._told():
            self._db.execute(
                "INSERT OR REPLACE INTO statements VALUES (?, ?, ?, ?, ?)",
                (signer, statement.after, last, signed.payload, signed.signature),
            )

    # appeals

    def appeals(self) -> list[Appeal]:
        """All, in the order they were made."""
        with self._told():
            return [Appeal(*row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM appeals ORDER BY number")]  # noqa: S608

    def add_appeal(self, appeal: Appeal) -> None:
        """Keep one that is to be sent. Raises ConfigurationError when too many are."""
        with self._told():
            count = "SELECT COUNT(*) FROM appeals WHERE state = 'unsent'"
            if self._db.execute(count).fetchone()[0] >= UNSENT_MAX:
                raise ConfigurationError(
                    f"{UNSENT_MAX} appeals wait to be sent; start the node, or wait until they are"
                )
            row = (appeal.appeal_id, appeal.coordinator, appeal.run, appeal.subject, appeal.text, appeal.state)
            self._db.execute(f"INSERT INTO appeals ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, '', NULL)", row)  # noqa: S608

    def answered(self, reply: AppealReply) -> None:
        """The coordinator's word on one."""
        self._set(reply.appeal_id, reply.state, reply.answer, reply.posting)

    def declined(self, appeal_id: bytes, why: str) -> None:
        """It was not taken, and never will be."""
        self._set(appeal_id, "declined", why, None)

    def _set(self, appeal_id: bytes, state: str, answer: str, posting: int | None) -> None:
        with self._told():
            self._db.execute(
                "UPDATE appeals SET state = ?, answer = ?, posting = ? WHERE appeal_id = ?",
                (state, answer, posting, appeal_id),
            )

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            raise SpoolFull(f"{self._path} cannot be written ({error}); free some room and the node goes on") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{self._path} is damaged ({error}); move it away: statements are fetched again, appeals that were not "
                "sent are lost"
            ) from error


def kept_statements(path: Path, signer: str) -> list[Signed]:
    """This coordinator's, in order, of a file that a running node may be using. Raises ConfigurationError."""
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_SECONDS)) as db:
            query = "SELECT payload, signature FROM statements WHERE signer = ? ORDER BY after"
            rows = db.execute(query, (signer,)).fetchall()
    except sqlite3.Error as error:
        raise ConfigurationError(f"there are no statements to read in {path}: {error}") from error
    return [Signed(payload=payload, signature=signature) for payload, signature in rows]
