"""The ledger's tables. A rollout's row is also its receipt: they cannot differ, and one insert is half the work of two.

Times are Unix seconds of the coordinator. Ids, hashes and arrays are raw bytes, as on the wire.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = 7
"""Raised on any change of these tables, with a step in `migrations`. A later one is refused, never guessed at."""

LONG = Integer().with_variant(BigInteger(), "postgresql")
"""SQLite's integers have 64 bits as they are, and number rows by themselves only under this name."""

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("hash", LargeBinary(32), primary_key=True),  # SHA-256: whoever reads the ledger cannot join with it
    Column("quota", Integer, nullable=False),
    Column("used", Integer, nullable=False),
    Column("expires", Float),  # None: never
    Column("created", Float, nullable=False),
    Column("run", String(64)),  # the only run that it lets nodes into; None: any
)

access = Table(
    "access",  # tokens of people and their programs, over REST
    metadata,
    Column("hash", LargeBinary(32), primary_key=True),  # SHA-256 of the token
    Column("name", String(64), nullable=False),  # what the audit log calls its holder
    Column("role", String(16), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),  # None: never
    Column("revoked", Float),  # when; None while it counts
)

nodes = Table(
    "nodes",
    metadata,
    Column("peer", String(64), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("name", String(64), nullable=False),
    Column("software", Text, nullable=False),
    Column("addresses", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("first_hello", Float, nullable=False),
    Column("last_hello", Float, nullable=False),
    Column("price", LONG, nullable=False, server_default="0"),  # micro-dollars an hour that it asks
    Column("home", LargeBinary(32)),  # SHA-256 of the mark of the folder it runs in: see `sessions`
    Column("back", String(16), nullable=False, server_default="active"),  # what one that left was before
    Column("warmup_returned", Integer, nullable=False, server_default="0"),
    Column("warmup_failed", Integer, nullable=False, server_default="0"),
    Column("benchmark_rollouts", Float),  # per second; None while it is not measured
    Column("benchmark_tokens", Float),
    Column("run", String(64)),  # that it is placed in; None: it never was
    Column("wanted", String(64)),  # the only run that it takes part in, by its join string; None: any
    Column("bound", String(64)),  # the only run that its token lets it into; None: any
)

node_transitions = Table(
    "node_transitions",
    metadata,
    # What each node's state came from: `node_states`. The newest of a node is what `nodes.state` says.
    Column("peer", String(64), nullable=False),
    Column("number", Integer, nullable=False),  # 1, 2, 3, ... for each node
    Column("event", String(16), nullable=False),
    Column("from_state", String(16), nullable=False),
    Column("to_state", String(16), nullable=False),
    Column("actor", String(64), nullable=False),
    Column("reason", Text, nullable=False),
    Column("wall", Float, nullable=False),
    Column("expires", Float),  # None: it does not end by itself
    PrimaryKeyConstraint("peer", "number"),
)

runs = Table(
    "runs",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("terms", Text, nullable=False),  # what must not change under way, as JSON
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("learner_epoch", Integer, nullable=False),
    Column("learner_version", Integer, nullable=False),
    Column("learner_status", Text, nullable=False),
    Column("settings", Text),  # of a run that was created over REST, as JSON; None: it is in the settings file
)

manifests = Table(
    "manifests",
    metadata,
    Column("run", String(64), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("signature", LargeBinary(64), nullable=False),
    Column("published", Float, nullable=False),
    Column("broadcast_seconds", Float),  # T_bcast, once enough nodes have it
    PrimaryKeyConstraint("run", "epoch", "version"),
)

leases = Table(
    "leases",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),  # the order of granting
    Column("run", String(64), nullable=False),
    Column("lease_id", LargeBinary(16), nullable=False, unique=True),
    Column("peer", String(64), nullable=False),
    Column("kind", String(8), nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("sample_first", Integer, nullable=False),
    Column("sample_count", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("manifest_hash", LargeBinary(32), nullable=False),
    Column("tokens_max", Integer, nullable=False),
    Column("duration_seconds", Float, nullable=False),
    Column("granted", Float, nullable=False),
    Column("ended", Text),  # why it was given up; None while it is out or once its slice came
    Column("account", Integer),  # what it is paid from; None for a volunteer's
)

closed_groups = Table(
    "closed_groups",
    metadata,
    Column("run", String(64), nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    PrimaryKeyConstraint("run", "ordinal"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),  # the order of arrival
    Column("run", String(64), nullable=False),
    Column("lease_id", LargeBinary(16), nullable=False),
    Column("sample", Integer, nullable=False),
    Column("peer", String(64), nullable=False),
    Column("kind", String(8), nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("finish", String(8), nullable=False),
    Column("claimed_reward", Float),  # what the node's own sandbox said
    Column("reward", Float),
    Column("details", Text),  # an episode's other measures, as JSON
    Column("received", Float, nullable=False),
    Column("admitted_sequence", Integer),
    Column("step", Integer),  # the training step that decided it
    Column("receipt_sequence", Integer),  # of its node; set with the terminal state
    Column("in_time", Integer),  # 1: it came, whole, within its lease's duration; None: not written down
    UniqueConstraint("run", "lease_id", "sample"),
)

contents = Table(
    "contents",
    metadata,
    # Of a rollout that passed intake. Apart from it, or each of its states would write all of this again.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("tokens", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("spans", LargeBinary, nullable=False),  # int32 as in tokens; empty for one turn
)

_has_receipt = rollouts.c.receipt_sequence.is_not(None)
Index(
    "rollouts_receipts",
    rollouts.c.run,
    rollouts.c.peer,
    rollouts.c.receipt_sequence,
    unique=True,
    sqlite_where=_has_receipt,
    postgresql_where=_has_receipt,
)
_unfinished = rollouts.c.state.in_(("held", "admitted"))
Index("rollouts_unfinished", rollouts.c.run, rollouts.c.id, sqlite_where=_unfinished, postgresql_where=_unfinished)

events = Table(
    "events",
    metadata,
    Column("id", LONG, primary_key=True, autoincrement=True),
    Column("wall", Float, nullable=False),
    Column("actor", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", String(128), nullable=False),
    Column("reason", Text, nullable=False),
    Column("kind", String(16), nullable=False, server_default="audit"),  # "audit": for people; "flow": the daily work
    Column("body", LargeBinary),  # the change in full, for `history.replay`; None for what changes no table
)
_audit = events.c.kind == "audit"
Index("events_audit", events.c.id, sqlite_where=_audit, postgresql_where=_audit)

postings = Table(
    "postings",
    metadata,
    Column("id", LONG, primary_key=True, autoincrement=False),  # 1, 2, 3, ...: a gap is a row that was taken away
    Column("run", String(64), nullable=False),
    Column("peer", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("unit", String(8), nullable=False),
    Column("amount_micros", LONG, nullable=False),  # negative when it is taken back
    Column("quantity", LONG, nullable=False),  # rollouts or bytes that it is for
    Column("actor", String(64), nullable=False),
    Column("reason", Text, nullable=False),
    Column("wall_micros", LONG, nullable=False),  # an integer, as all that is hashed: it reads the same everywhere
    Column("previous", LargeBinary(32), nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
)
Index("postings_peer", postings.c.peer, postings.c.id)

accounts = Table(
    "accounts",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),  # one for each activation of a paid node
    Column("run", String(64), nullable=False),
    Column("peer", String(64), nullable=False),
    Column("price", LONG, nullable=False),  # micro-dollars an hour, fixed
    Column("mu", Float),  # rollouts a second that rho was made of; None until it is measured
    Column("rho", LONG),  # pico-dollars per rollout, fixed with mu
    Column("rollouts", LONG, nullable=False),  # payable so far
    Column("milliseconds", LONG, nullable=False),  # at work so far
    Column("entered", LONG, nullable=False),  # micro-dollars posted so far
    Column("opened", Float, nullable=False),
    Column("counted", Float, nullable=False),  # until when `milliseconds` are counted
    Column("released", Float),  # None while its node is activated
    Column("closed", Float),  # None while anything may become due
)
_open_account = accounts.c.closed.is_(None)
Index("accounts_open", accounts.c.run, sqlite_where=_open_account, postgresql_where=_open_account)

relays = Table(
    "relays",
    metadata,
    Column("manifest_hash", LargeBinary(32), nullable=False),
    Column("receiver", String(64), nullable=False),  # who acknowledged
    Column("relay", String(64), nullable=False),  # who sent
    Column("run", String(64), nullable=False),
    Column("bytes", LONG, nullable=False),  # planned ones, credited
    PrimaryKeyConstraint("manifest_hash", "receiver", "relay"),
)

appeals = Table(
    "appeals",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),  # the order they came in
    Column("run", String(64), nullable=False),
    Column("peer", String(64), nullable=False),
    Column("appeal_id", LargeBinary(16), nullable=False),  # the node's: one that is sent again is the same one
    Column("subject", String(32), nullable=False),  # a lease in hexadecimal, or "suspension"
    Column("text", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("answer", Text, nullable=False),
    Column("posting", LONG),  # the adjustment that came of it
    Column("created", Float, nullable=False),
    Column("resolved", Float),
    UniqueConstraint("peer", "appeal_id"),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("run", String(64), nullable=False),
    Column("version", Integer, nullable=False),
    Column("purpose", String(16), nullable=False),
    Column("size", Integer, nullable=False),
    Column("count", Integer, nullable=False),
    Column("mean", Float),
    Column("samples", Integer, nullable=False),  # of each prompt
    Column("finished", Float),  # None while under way
    Column("reason", Text, nullable=False),  # why it ended before it was complete
    PrimaryKeyConstraint("run", "version"),
)

steps = Table(
    "steps",
    metadata,
    Column("run", String(64), nullable=False),
    Column("step", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("metrics", LargeBinary, nullable=False),  # StepMetrics, encoded as on the wire
    Column("reported", Float, nullable=False),
    PrimaryKeyConstraint("run", "step"),
)
