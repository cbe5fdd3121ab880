"""From the tables of an older release to today's, one step a schema version, each in the transaction that records it.

`meta.schema_version` is the only record of where a ledger stands; alembic supplies the operations, which hide what
SQLite and PostgreSQL call differently. A test upgrades an empty database through every step and has alembic compare it
with `schema`. A step is never changed once it was released: it repeats here what the tables were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from . import schema
from .database import is_sqlite

if TYPE_CHECKING:
    from collections.abc import Callable

    from alembic.operations import Operations

FIRST_VERSION = 2
"""The oldest ledger that can be upgraded."""


def upgrade(connection: sa.Connection, found: int, to: int = schema.SCHEMA_VERSION) -> None:
    """Bring the tables from version `found` to version `to`. Inside the caller's transaction."""
    from alembic.operations import Operations  # a third of a second, needed once in a release
    from alembic.runtime.migration import MigrationContext

    operations = Operations(MigrationContext.configure(connection))
    for version in range(found + 1, to + 1):
        STEPS[version](operations)
    connection.execute(
        sa.update(schema.meta).where(schema.meta.c.key == "schema_version").values(value=b"%d" % max(found, to))
    )


def create_first(connection: sa.Connection) -> None:
    """The tables of FIRST_VERSION in an empty database: where the steps begin, in tests."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    _first(Operations(MigrationContext.configure(connection)))
    connection.execute(sa.insert(schema.meta).values(key="schema_version", value=b"%d" % FIRST_VERSION))


def _first(op: Operations) -> None:
    def text(name: str, length: int | None = None, **options: Any) -> sa.Column[str]:
        return sa.Column(name, sa.String(length) if length else sa.Text, **{"nullable": False} | options)

    def number(name: str, **options: Any) -> sa.Column[int]:
        return sa.Column(name, sa.Integer, **{"nullable": False} | options)

    def real(name: str, **options: Any) -> sa.Column[float]:
        return sa.Column(name, sa.Float, **{"nullable": False} | options)

    def raw(name: str, length: int | None = None, **options: Any) -> sa.Column[bytes]:
        return sa.Column(name, sa.LargeBinary(length), **{"nullable": False} | options)

    op.create_table("meta", text("key", 64, primary_key=True), raw("value"))
    op.create_table(
        "tokens",
        *(raw("hash", 32, primary_key=True), number("quota"), number("used")),
        *(real("expires", nullable=True), real("created")),
    )
    op.create_table(
        "nodes",
        *(text("peer", 64, primary_key=True), text("role", 16), text("name", 64), text("software"), text("addresses")),
        *(text("state", 16), text("reason"), real("first_hello"), real("last_hello")),
    )
    op.create_table(
        "runs",
        *(text("run", 64, primary_key=True), text("terms"), text("state", 16), text("reason"), real("created")),
        *(number("learner_epoch"), number("learner_version"), text("learner_status")),
    )
    op.create_table(
        "manifests",
        *(text("run", 64), number("epoch"), number("version"), raw("hash", 32), raw("payload"), raw("signature", 64)),
        *(real("published"), real("broadcast_seconds", nullable=True)),
        sa.PrimaryKeyConstraint("run", "epoch", "version"),
    )
    op.create_table(
        "leases",
        *(number("id", primary_key=True, autoincrement=True), text("run", 64)),
        *(raw("lease_id", 16), text("peer", 64), text("kind", 8)),
        *(number("ordinal"), number("sample_first"), number("sample_count"), number("version")),
        *(raw("manifest_hash", 32), number("tokens_max"), real("duration_seconds"), real("granted")),
        sa.UniqueConstraint("lease_id"),
    )
    op.create_table(
        "closed_groups", text("run", 64), number("ordinal"), text("reason"), sa.PrimaryKeyConstraint("run", "ordinal")
    )
    op.create_table(
        "rollouts",
        *(number("id", primary_key=True, autoincrement=True), text("run", 64), raw("lease_id", 16), number("sample")),
        *(text("peer", 64), text("kind", 8), number("ordinal"), number("version"), text("state", 16), text("reason")),
        *(text("finish", 8), raw("tokens"), raw("logprobs"), raw("spans"), real("claimed_reward", nullable=True)),
        *(real("reward", nullable=True), text("details", nullable=True), real("received")),
        *(number(name, nullable=True) for name in ("admitted_sequence", "step", "receipt_sequence")),
        sa.UniqueConstraint("run", "lease_id", "sample"),
    )
    has_receipt, unfinished = sa.text("receipt_sequence IS NOT NULL"), sa.text("state IN ('held', 'admitted')")
    receipts = ["run", "peer", "receipt_sequence"]
    op.create_index(
        "rollouts_receipts", "rollouts", receipts, unique=True, sqlite_where=has_receipt, postgresql_where=has_receipt
    )
    op.create_index(
        "rollouts_unfinished", "rollouts", ["run", "id"], sqlite_where=unfinished, postgresql_where=unfinished
    )
    op.create_table(
        "events",
        *(number("id", primary_key=True, autoincrement=True), real("wall"), text("actor", 64)),
        *(text("action", 64), text("subject", 128), text("reason")),
    )
    op.create_table(
        "evaluations",
        *(text("run", 64), number("version"), text("purpose", 16), number("size"), number("count")),
        *(real("mean", nullable=True), number("samples"), real("finished", nullable=True), text("reason")),
        sa.PrimaryKeyConstraint("run", "version"),
    )
    op.create_table(
        "steps",
        *(text("run", 64), number("step"), number("epoch"), raw("metrics"), real("reported")),
        sa.PrimaryKeyConstraint("run", "step"),
    )


def _log_and_postings(op: Operations) -> None:
    """Events say the change in full, leases why they ended; rollouts' contents are apart; postings have a chain."""
    from .history import record_state

    connection = op.get_bind()
    long = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
    if not is_sqlite(connection):  # SQLite's have 64 bits already
        op.alter_column("events", "id", type_=sa.BigInteger(), existing_type=sa.Integer())
    op.add_column("events", sa.Column("kind", sa.String(16), nullable=False, server_default="audit"))
    op.add_column("events", sa.Column("body", sa.LargeBinary))
    audit = sa.text("kind = 'audit'")
    op.create_index("events_audit", "events", ["id"], sqlite_where=audit, postgresql_where=audit)
    op.add_column("leases", sa.Column("ended", sa.Text))
    content = ("tokens", "logprobs", "spans")
    op.create_table(
        "contents",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.LargeBinary, nullable=False) for name in content),
    )
    op.execute(
        "INSERT INTO contents SELECT id, tokens, logprobs, spans FROM rollouts "
        "WHERE length(tokens) > 0 OR state IN ('held', 'admitted')"
    )
    for name in content:
        op.drop_column("rollouts", name)
    op.create_table(
        "postings",
        sa.Column("id", long, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in POSTING_NAMES.items()),
        *(sa.Column(name, long, nullable=False) for name in ("amount_micros", "quantity")),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("wall_micros", long, nullable=False),
        *(sa.Column(name, sa.LargeBinary(32), nullable=False) for name in ("previous", "hash")),
    )
    op.create_index("postings_peer", "postings", ["peer", "id"])
    record_state(connection)  # what came before the log: replay begins with it


POSTING_NAMES = {"run": 64, "peer": 64, "kind": 16, "unit": 8}


def _money(op: Operations) -> None:
    """What each activation is owed, credited relays, appeals; prices that nodes ask."""
    long = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
    op.add_column("nodes", sa.Column("price", long, nullable=False, server_default="0"))
    op.add_column("leases", sa.Column("account", sa.Integer))
    op.add_column("rollouts", sa.Column("in_time", sa.Integer))
    op.create_table(
        "accounts",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.String(64), nullable=False) for name in ("run", "peer")),
        sa.Column("price", long, nullable=False),
        sa.Column("mu", sa.Float),
        sa.Column("rho", long),
        *(sa.Column(name, long, nullable=False) for name in ("rollouts", "milliseconds", "entered")),
        *(sa.Column(name, sa.Float, nullable=False) for name in ("opened", "counted")),
        *(sa.Column(name, sa.Float) for name in ("released", "closed")),
    )
    is_open = sa.text("closed IS NULL")
    op.create_index("accounts_open", "accounts", ["run"], sqlite_where=is_open, postgresql_where=is_open)
    op.create_table(
        "relays",
        sa.Column("manifest_hash", sa.LargeBinary(32), nullable=False),
        *(sa.Column(name, sa.String(64), nullable=False) for name in ("receiver", "relay", "run")),
        sa.Column("bytes", long, nullable=False),
        sa.PrimaryKeyConstraint("manifest_hash", "receiver", "relay"),
    )
    op.create_table(
        "appeals",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.String(64), nullable=False) for name in ("run", "peer")),
        sa.Column("appeal_id", sa.LargeBinary(16), nullable=False),
        sa.Column("subject", sa.String(32), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
        sa.Column("posting", long),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("resolved", sa.Float),
        sa.UniqueConstraint("peer", "appeal_id"),
    )


def _node_states(op: Operations) -> None:
    """A node has a history of states, and a probation; those that are known have passed it."""
    from .history import Update, encode

    connection = op.get_bind()
    new: dict[str, Any] = {"home": None, "back": "active", "warmup_returned": 0, "warmup_failed": 0}
    op.add_column("nodes", sa.Column("home", sa.LargeBinary(32)))
    op.add_column("nodes", sa.Column("back", sa.String(16), nullable=False, server_default="active"))
    for name in ("warmup_returned", "warmup_failed"):
        op.add_column("nodes", sa.Column(name, sa.Integer, nullable=False, server_default="0"))
    for name in ("benchmark_rollouts", "benchmark_tokens"):
        op.add_column("nodes", sa.Column(name, sa.Float))
        new[name] = None
    states = ("event", "from_state", "to_state")
    op.create_table(
        "node_transitions",
        sa.Column("peer", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        *(sa.Column(name, sa.String(16), nullable=False) for name in states),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("wall", sa.Float, nullable=False),
        sa.Column("expires", sa.Float),
        sa.PrimaryKeyConstraint("peer", "number"),
    )
    peers = connection.scalars(sa.text("SELECT peer FROM nodes ORDER BY peer")).all()
    if peers:  # the log tells the tables again: it has to know of the new columns
        body = encode([Update("nodes", tuple(new), [[peer, *new.values()] for peer in peers])])
        values = {"wall": 0.0, "actor": "coordinator", "action": "state recorded", "subject": "nodes"}
        events = sa.table("events", *map(sa.column, (*values, "reason", "kind", "body")))
        connection.execute(sa.insert(events).values(**values, reason="nodes have states", kind="flow", body=body))


def _access(op: Operations) -> None:
    """Tokens of people over REST, each with a name and a role."""
    op.create_table(
        "access",
        sa.Column("hash", sa.LargeBinary(32), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        *(sa.Column(name, sa.Float) for name in ("expires", "revoked")),
    )


def _runs(op: Operations) -> None:
    """Several runs share a pool: which a node is placed in, which its token is for; runs created over REST."""
    for name in ("run", "wanted", "bound"):
        op.add_column("nodes", sa.Column(name, sa.String(64)))
    op.add_column("tokens", sa.Column("run", sa.String(64)))
    op.add_column("runs", sa.Column("settings", sa.Text))


STEPS: dict[int, Callable[[Operations], None]] = {
    3: _log_and_postings,
    4: _money,
    5: _node_states,
    6: _access,
    7: _runs,
}
"""By the version that each leads to."""
