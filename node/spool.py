"""What a node must not lose: finished slices not yet acknowledged, receipts, and the counts it shows its owner.

SQLite in WAL mode with synchronous=FULL: what a method has returned survives `kill -9` and a power cut. Slices keep the
exact records that are sent; receipts keep the coordinator's signed bytes, so they can be verified offline for good.
A full disk raises `SpoolFull`; nothing half-written remains and the same call may be repeated. A damaged file raises
ConfigurationError, from any method: a node that goes on with half a memory would count and send things twice.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echo2.p2p.codec import decode_record, encode_record
from echo2.p2p.daemon import keep_private
from echo2.p2p.errors import ConfigurationError, Echo2Error, ProtocolError
from echo2.p2p.messages import SLICES_MAX, Receipt, ReceiptBatch, Signed, Slice, SliceAck

Kind = Literal["train", "eval"]

SUBMIT_BYTES_MAX = 12 << 20
"""Rollout bytes in one submission: well under its frame's 16 MiB, with room for msgpack's own."""

ACKED_ROWS_MAX = 20_000
"""Acknowledged slices kept as history; their counts stay for ever in `total`."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS slice (
    lease_id BLOB PRIMARY KEY, run TEXT NOT NULL, kind TEXT NOT NULL,
    ordinal INTEGER NOT NULL, version INTEGER NOT NULL, samples INTEGER NOT NULL, bytes INTEGER NOT NULL,
    record BLOB, state TEXT NOT NULL, reason TEXT NOT NULL, decided BLOB NOT NULL DEFAULT x''
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS queue (place INTEGER PRIMARY KEY AUTOINCREMENT, lease_id BLOB NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS history (place INTEGER PRIMARY KEY AUTOINCREMENT, lease_id BLOB NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS receipts (
    run TEXT NOT NULL, last INTEGER NOT NULL, payload BLOB NOT NULL, signature BLOB NOT NULL, PRIMARY KEY (run, last)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS joined (run TEXT PRIMARY KEY, coordinator TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS total (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""

_FULL = frozenset({"SQLITE_FULL", "SQLITE_IOERR", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_CANTOPEN"})


class SpoolFull(Echo2Error):
    """The disk takes no more. Nothing was changed; the same call may be repeated once there is room."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A slice as generated, with what its lease said of it."""

    run: str
    kind: Kind
    ordinal: int
    version: int
    slice: Slice


@dataclass(frozen=True, slots=True)
class Counts:
    """Rollouts, not slices. `submitted` are acknowledged ones (durable at the coordinator), each counted once.

    `receipts` are of this home's rollouts; the key's work in another home (the node was moved) is in
    `receipts_elsewhere`. `undecided`: acknowledged here, and no receipt speaks of them yet.
    """

    generated: int
    submitted: int
    evaluations_submitted: int
    spooled: int
    receipts: dict[str, int]
    receipts_elsewhere: int
    undecided: int


class Spool:
    """One file, one process (the node's lock sees to it). `":memory:"` lives as long as the object: for simulations."""

    def __init__(self, path: Path | str) -> None:
        self._path = path
        try:
            if path != ":memory:":
                keep_private(Path(path))
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            with self._reading():
                self._upgrade()
                self._remember()
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            if _is_damage(error):
                raise self._damaged(error) from error
            raise ConfigurationError(
                f"cannot use the spool {path}: {error}; free some room, or move the file away to start a new one"
            ) from error

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    # slices

    def add(self, finished: Sequence[Finished]) -> None:
        """Keep generated slices until they are acknowledged. A lease already kept is left as it is."""
        with self._transaction():
            for item in finished:
                record = encode_record(item.slice)
                samples = len(item.slice.rollouts)
                added = self._db.execute(
                    "INSERT OR IGNORE INTO slice VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'spooled', '', x'')",
                    (
                        item.slice.lease_id,
                        item.run,
                        item.kind,
                        item.ordinal,
                        item.version,
                        samples,
                        len(record),
                        record,
                    ),
                ).rowcount
                if added:
                    self._db.execute("INSERT INTO queue (lease_id) VALUES (?)", (item.slice.lease_id,))
                    self._count("generated", samples)
                    self._count("spooled", samples)

    def pending(self, run: str) -> list[Slice]:
        """The oldest slices that wait for an acknowledgement: at most one submission's worth."""
        chosen: list[Slice] = []
        total = 0
        with self._reading():
            rows = self._db.execute(
                "SELECT bytes, record FROM queue JOIN slice USING (lease_id) WHERE run = ? ORDER BY place LIMIT ?",
                (run, SLICES_MAX),
            ).fetchall()
            for size, record in rows:
                total += size
                if chosen and total > SUBMIT_BYTES_MAX:
                    break
                chosen.append(decode_record(record, Slice))
        return chosen

    def waiting(self, run: str) -> int:
        """Slices of this run that wait for an acknowledgement."""
        return self._waiting.get(run, 0)

    # runs

    def join(self, run: str, coordinator: str) -> None:
        """This coordinator has welcomed the node into the run: to it go the run's slices, from it come receipts."""
        if self._joined.get(run) != coordinator:
            with self._transaction():
                self._db.execute("INSERT OR REPLACE INTO joined VALUES (?, ?)", (run, coordinator))

    def joined(self, coordinator: str) -> tuple[str, ...]:
        """The runs of a coordinator that this home was welcomed into."""
        return tuple(sorted(run for run, found in self._joined.items() if found == coordinator))

    def acknowledge(self, acks: Sequence[SliceAck]) -> int:
        """Forget the bytes of acknowledged slices and count them, each once. Returns how many were news."""
        news = 0
        with self._transaction():
            for ack in acks:
                row = self._db.execute(
                    "SELECT kind, samples, decided FROM slice WHERE lease_id = ? AND record IS NOT NULL",
                    (ack.lease_id,),
                ).fetchone()
                if row is None:
                    continue
                kind, samples, decided = row
                self._db.execute(
                    "UPDATE slice SET record = NULL, state = ?, reason = ? WHERE lease_id = ?",
                    (ack.state, ack.reason, ack.lease_id),
                )
                self._db.execute("DELETE FROM queue WHERE lease_id = ?", (ack.lease_id,))
                self._db.execute("INSERT INTO history (lease_id) VALUES (?)", (ack.lease_id,))
                self._count("submitted" if kind == "train" else "evaluations_submitted", samples)
                self._count("spooled", -samples)
                self._count("undecided", samples - _bits(decided).bit_count())
                news += 1
            self._prune()
        return news

    def give_up(self, lease_id: bytes, reason: str) -> None:
        """Put aside a slice that can never be sent; it stays in the history, uncounted."""
        with self._transaction():
            row = self._db.execute(
                "SELECT samples FROM slice WHERE lease_id = ? AND record IS NOT NULL", (lease_id,)
            ).fetchone()
            if row is None:
                return
            self._db.execute(
                "UPDATE slice SET record = NULL, state = 'unsendable', reason = ? WHERE lease_id = ?",
                (reason, lease_id),
            )
            self._db.execute("DELETE FROM queue WHERE lease_id = ?", (lease_id,))
            self._db.execute("INSERT INTO history (lease_id) VALUES (?)", (lease_id,))
            self._count("spooled", -row[0])

    # receipts

    def knows(self, run: str) -> bool:
        """Whether this home has worked under leases of this run, or has receipts of it."""
        with self._reading():
            worked = self._db.execute("SELECT 1 FROM slice WHERE run = ? LIMIT 1", (run,)).fetchone()
        return worked is not None or self.receipts_after(run) > 0

    def receipts_after(self, run: str) -> int:
        """The cursor: the highest sequence kept for this run, 0 for none."""
        with self._reading():
            (last,) = self._db.execute("SELECT MAX(last) FROM receipts WHERE run = ?", (run,)).fetchone()
            return int(last or 0)

    def keep_receipts(self, signed: Signed, batch: ReceiptBatch) -> int:
        """Keep a verified batch, its exact bytes, and count the receipts above the cursor. Returns how many."""
        after = self.receipts_after(batch.run)
        new = [receipt for receipt in batch.receipts if receipt.sequence > after]
        if new:
            with self._transaction():
                self._db.execute(
                    "INSERT INTO receipts VALUES (?, ?, ?, ?)",
                    (batch.run, max(r.sequence for r in new), signed.payload, signed.signature),
                )
                for receipt in new:
                    self._decide(receipt)
        return len(new)

    def _decide(self, receipt: Receipt) -> None:
        """Count a receipt, by lease and sample: other homes with this key have receipts of their own work."""
        row = self._db.execute(
            "SELECT decided, record IS NULL FROM slice WHERE lease_id = ? AND state != 'unsendable'",
            (receipt.lease_id,),
        ).fetchone()
        if row is None:
            self._count("receipts_elsewhere", 1)
            return
        decided, acknowledged = row
        bits, bit = _bits(decided), 1 << receipt.sample
        if bits & bit:
            return
        self._db.execute("UPDATE slice SET decided = ? WHERE lease_id = ?", (_blob(bits | bit), receipt.lease_id))
        self._count(f"receipt:{receipt.state}", 1)
        if acknowledged:
            self._count("undecided", -1)

    def receipt_batches(self, run: str) -> Iterator[Signed]:
        """Every kept batch in order, as signed."""
        with self._reading():
            rows = self._db.execute(
                "SELECT payload, signature FROM receipts WHERE run = ? ORDER BY last", (run,)
            ).fetchall()
        for payload, signature in rows:
            yield Signed(payload=payload, signature=signature)

    # counts

    def counts(self) -> Counts:
        """The sums, over all runs this home has taken part in."""
        totals = self._totals
        return Counts(
            generated=totals.get("generated", 0),
            submitted=totals.get("submitted", 0),
            evaluations_submitted=totals.get("evaluations_submitted", 0),
            spooled=totals.get("spooled", 0),
            receipts={name.split(":")[1]: value for name, value in totals.items() if name.startswith("receipt:")},
            receipts_elsewhere=totals.get("receipts_elsewhere", 0),
            undecided=totals.get("undecided", 0),
        )

    def _count(self, name: str, by: int) -> None:
        self._db.execute(
            "INSERT INTO total VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (name, by),
        )

    def _remember(self) -> None:
        """The sums in memory: they are asked for at every turn of the services."""
        self._totals: dict[str, int] = dict(self._db.execute("SELECT name, value FROM total"))
        self._waiting: dict[str, int] = dict(
            self._db.execute("SELECT run, COUNT(*) FROM queue JOIN slice USING (lease_id) GROUP BY run")
        )
        self._joined: dict[str, str] = dict(self._db.execute("SELECT run, coordinator FROM joined"))
        if not all(isinstance(text, str) for pair in self._joined.items() for text in pair):
            raise ValueError("a row of the table joined is no text")
        if not all(isinstance(value, int) for value in self._totals.values()):
            raise ValueError("a sum in the table total is no number")
        if not all(isinstance(run, str) for run in self._waiting):
            raise ValueError("a run in the table slice has no name")

    def _prune(self) -> None:
        old = self._db.execute(
            "SELECT lease_id, samples, decided, state FROM slice JOIN history USING (lease_id) "
            "WHERE place <= (SELECT MAX(place) FROM history) - ?",
            (ACKED_ROWS_MAX,),
        ).fetchall()
        for lease_id, samples, decided, state in old:
            if state != "unsendable":
                self._count("undecided", _bits(decided).bit_count() - samples)  # nobody waits for these any more
            self._db.execute("DELETE FROM slice WHERE lease_id = ?", (lease_id,))
        self._db.execute("DELETE FROM history WHERE place <= (SELECT MAX(place) FROM history) - ?", (ACKED_ROWS_MAX,))

    def _upgrade(self) -> None:
        """A spool of before receipts were matched with leases: the kept batches say which are decided."""
        if "decided" in {row[1] for row in self._db.execute("PRAGMA table_info(slice)")}:
            return
        with self._transaction():
            self._db.execute("ALTER TABLE slice ADD COLUMN decided BLOB NOT NULL DEFAULT x''")
            self._db.execute("DELETE FROM total WHERE name LIKE 'receipt:%'")
            seen: dict[str, int] = {}
            kept = self._db.execute("SELECT run, payload FROM receipts ORDER BY run, last").fetchall()
            for run, payload in kept:
                for receipt in decode_record(payload, ReceiptBatch).receipts:
                    if receipt.sequence > seen.get(run, 0):
                        seen[run] = receipt.sequence
                        self._decide(receipt)
            self._db.execute("DELETE FROM total WHERE name = 'undecided'")
            left = self._db.execute(
                "SELECT samples, decided FROM slice WHERE record IS NULL AND state != 'unsendable'"
            ).fetchall()
            self._count("undecided", sum(samples - _bits(decided).bit_count() for samples, decided in left))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
            self._remember()
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            self._rollback()
            raise  # a defect of ours, not of the disk
        except UnicodeDecodeError as error:
            self._rollback()
            raise self._damaged(error) from error
        except sqlite3.DatabaseError as error:
            self._rollback()
            name = getattr(error, "sqlite_errorname", "")
            if name in _FULL or name.startswith("SQLITE_IOERR"):
                raise SpoolFull(f"the disk takes no more ({error}); free some room and the node goes on") from error
            if _is_damage(error):
                raise self._damaged(error) from error
            raise ConfigurationError(f"cannot use the spool {self._path}: {error}") from error
        except BaseException:
            self._rollback()
            raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a defect of ours
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                raise self._damaged(error) from error
            raise ConfigurationError(f"cannot use the spool {self._path}: {error}") from error
        except (ProtocolError, TypeError, ValueError) as error:  # no database's page, but not what was written
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> ConfigurationError:
        said = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        return ConfigurationError(
            f"cannot use the spool {self._path}: it is damaged ({said}); put back a copy of it, or move it away, with "
            "what is called -wal and -shm beside it, to start a new one: lost then are work that was not yet "
            "acknowledged, the receipts kept here and the counts shown here, but nothing that was acknowledged"
        )

    def _rollback(self) -> None:
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError):  # what went wrong before says more
                self._db.execute("ROLLBACK")


def _is_damage(error: Exception) -> bool:
    """Whether pages are not what was written. Extended codes too, such as SQLITE_CORRUPT_INDEX; text that is none.

    Also the text of SQLite's own errors: it quotes a damaged schema, and Python takes that for UTF-8.
    """
    if isinstance(error, UnicodeDecodeError):
        return True
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "decode to UTF-8" in str(error)


def _bits(decided: bytes) -> int:
    """Samples of a slice that a receipt speaks of, one bit each."""
    return int.from_bytes(decided, "little")


def _blob(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
