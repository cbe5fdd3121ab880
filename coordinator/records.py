"""Rows of the ledger, written and read. Every function works inside the caller's transaction.

Whatever changes a table goes through `record`, which writes the event of it too (`history`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa

from echo2.p2p.codec import decode_record, encode_record, pack_tokens, unpack_tokens
from echo2.p2p.messages import Receipt, Signed, StepMetrics

from . import schema
from .bulk import carry_out_in_bulk
from .history import KEYS, Change, Delete, Insert, Update, encode

if TYPE_CHECKING:
    from .leases import LeaseEntry

UNFINISHED = sa.text("state IN ('held', 'admitted')")
"""As the partial index has it: with bound parameters SQLite would not see that the index serves."""

AUDIT = sa.text("kind = 'audit'")
"""Likewise."""

Details = Mapping[str, float]
"""Measures of an episode beside its reward, by name."""

EventKind = Literal["audit", "flow"]
"""Of an event: for people to read, or one of many that the daily work makes."""

RolloutState = Literal["held", "admitted", "consumed", "stale", "withdrawn", "rejected", "duplicate", "evaluated"]


@dataclass(slots=True)
class RolloutEntry:
    """A rollout from its arrival to its terminal state. Those with a terminal state leave memory."""

    id: int
    lease_id: bytes
    sample: int
    peer: str
    kind: Literal["train", "eval"]
    ordinal: int
    version: int
    state: RolloutState
    reason: str
    finish: Literal["stop", "length"]
    tokens: bytes
    logprobs: bytes
    spans: tuple[int, ...] = ()
    claimed_reward: float | None = None
    reward: float | None = None
    details: Details | None = None
    """What its episode measured beside the reward."""
    sequence: int = 0
    """Its place among the admitted; 0 before."""
    account: int | None = None
    """What its node is paid from; None for a volunteer's."""
    in_time: bool = True
    """It came, whole, within its lease's duration."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rollout's new state. `receipt_sequence` with the terminal ones; `step` from the learner."""

    entry: RolloutEntry
    state: RolloutState
    reason: str = ""
    receipt_sequence: int | None = None
    reward: float | None = None
    sequence: int | None = None
    step: int | None = None
    details: Details | None = None


def record(
    connection: sa.Connection,
    changes: Sequence[Change] = (),
    *,
    wall: float,
    actor: str,
    action: str,
    subject: str = "",
    reason: str = "",
    kind: EventKind = "audit",
) -> None:
    """Carry out changes and write the event of them: a line of the audit log, or of the daily flow.

    Raises IntegrityError for what is there already, LookupError for an update of what is not.
    """
    for change in changes:
        _carry_out(connection, change)
    connection.execute(
        _INSERT_EVENT,
        {
            "wall": wall,
            "actor": actor,
            "action": action,
            "subject": subject,
            "reason": storable(reason[:512]),
            "kind": kind,
            "body": encode(changes) if changes else None,
        },
    )


_INSERT_EVENT = sa.insert(schema.events)


def storable(text: str) -> str:
    """What a peer wrote, as every database takes it: PostgreSQL has no NUL in a text."""
    return text.replace("\0", "\ufffd")


def add_event(
    connection: sa.Connection, *, wall: float, actor: str, action: str, subject: str = "", reason: str = ""
) -> None:
    """A line of the audit log for what changes no table."""
    record(connection, wall=wall, actor=actor, action=action, subject=subject, reason=reason)


def _carry_out(connection: sa.Connection, change: Change) -> None:
    if not change.rows or (not isinstance(change, Delete) and carry_out_in_bulk(connection, change)):
        return
    if isinstance(change, Insert):
        names, shared = change.columns, change.shared
        rows = [{**dict(zip(names, row, strict=True)), **shared} for row in change.rows]
        if change.left_out is not None:
            for row, content in zip(rows, change.left_out, strict=True):
                row |= content
        connection.execute(_insert_of(change.table), rows)
        return
    keys = KEYS[change.table]
    columns = tuple(change.columns) if isinstance(change, Update) else ()
    names = [f"key_{name}" for name in keys] + [f"new_{name}" for name in columns]
    statement = _update_of(change.table, columns) if isinstance(change, Update) else _delete_of(change.table)
    done = connection.execute(statement, [dict(zip(names, row, strict=True)) for row in change.rows])
    if len(change.rows) == 1 and not done.rowcount:
        raise LookupError(f"no row {tuple(change.rows[0])} in {change.table}")


@lru_cache
def _insert_of(name: str) -> sa.Insert:
    return sa.insert(schema.metadata.tables[name])


def _is_it(name: str) -> sa.ColumnElement[bool]:
    table = schema.metadata.tables[name]
    return sa.and_(*(table.c[key] == sa.bindparam(f"key_{key}") for key in KEYS[name]))


@lru_cache
def _update_of(name: str, columns: tuple[str, ...]) -> sa.Update:
    values: dict[str, Any] = {column: sa.bindparam(f"new_{column}") for column in columns}
    return sa.update(schema.metadata.tables[name]).where(_is_it(name)).values(values)


@lru_cache
def _delete_of(name: str) -> sa.Delete:
    return sa.delete(schema.metadata.tables[name]).where(_is_it(name))


# changes of several rows


def new_leases(run: str, leases: Sequence[LeaseEntry], *, duration_seconds: float, wall: float) -> Insert:
    """Leases, before they are sent."""
    return Insert(
        "leases",
        LEASE_COLUMNS,
        [
            (
                lease.lease_id,
                lease.peer,
                lease.kind,
                lease.span.ordinal,
                lease.span.first,
                lease.span.count,
                lease.version,
                lease.manifest_hash,
                lease.tokens_max,
                lease.account,
            )
            for lease in leases
        ],
        {"run": run, "duration_seconds": duration_seconds, "granted": wall, "ended": None},
    )


LEASE_COLUMNS = (
    *("lease_id", "peer", "kind", "ordinal", "sample_first", "sample_count"),
    *("version", "manifest_hash", "tokens_max", "account"),
)


def ended_leases(ended: Mapping[bytes, str]) -> Update:
    """Leases that were given up, with the reason."""
    return Update("leases", ("ended",), list(ended.items()))


def _details_out(details: Details | None) -> str | None:
    return json.dumps(dict(details), sort_keys=True) if details else None


def details_in(text: str | None) -> Details | None:
    """The column `details` of a rollout."""
    return json.loads(text) if text else None


ARRIVAL_COLUMNS = (
    *("id", "lease_id", "sample", "peer", "kind", "ordinal", "version"),
    *("state", "reason", "finish", "claimed_reward", "receipt_sequence", "in_time"),
)


def arrived_rollouts(run: str, verdicts: Sequence[Verdict], *, wall: float) -> list[Change]:
    """What arrived: held, or already terminal. The latter's content is of no use to anybody."""
    rollouts = Insert(
        "rollouts",
        ARRIVAL_COLUMNS,
        [
            (
                entry.id,
                entry.lease_id,
                entry.sample,
                entry.peer,
                entry.kind,
                entry.ordinal,
                entry.version,
                verdict.state,
                storable(verdict.reason),
                entry.finish,
                entry.claimed_reward,
                verdict.receipt_sequence,
                int(entry.in_time),
            )
            for verdict in verdicts
            for entry in (verdict.entry,)
        ],
        {"run": run, "received": wall, "reward": None, "details": None, "admitted_sequence": None, "step": None},
    )
    contents = [
        (verdict.entry.id, verdict.entry.tokens, verdict.entry.logprobs, pack_tokens(verdict.entry.spans))
        for verdict in verdicts
        if verdict.state == "held"
    ]
    return [rollouts, Insert("contents", ("id", "tokens", "logprobs", "spans"), contents)]


CHANGED_COLUMNS = ("state", "reason", "reward", "details", "admitted_sequence", "step", "receipt_sequence")


def changed_rollouts(verdicts: Sequence[Verdict]) -> Update:
    """New states of rollouts that are held or admitted."""
    return Update(
        "rollouts",
        CHANGED_COLUMNS,
        [
            (
                verdict.entry.id,
                verdict.state,
                storable(verdict.reason),
                verdict.entry.reward if verdict.reward is None else verdict.reward,
                _details_out(verdict.entry.details if verdict.details is None else verdict.details),
                verdict.sequence or verdict.entry.sequence or None,
                verdict.step,
                verdict.receipt_sequence,
            )
            for verdict in verdicts
        ],
    )


def closed_groups(run: str, groups: Mapping[int, str]) -> Insert:
    """Groups that need nothing more, with the reason."""
    return Insert("closed_groups", ("ordinal", "reason"), list(groups.items()), {"run": run})


def reported_steps(
    connection: sa.Connection, run: str, epoch: int, steps: Sequence[StepMetrics], *, wall: float
) -> list[Change]:
    """Steps; one that was trained again after a crash replaces what was lost."""
    numbers = {metrics.step: metrics for metrics in steps}
    if not numbers:
        return []
    table = schema.steps
    known = connection.scalars(sa.select(table.c.step).where(table.c.run == run, table.c.step.in_(list(numbers))))
    return [
        Delete("steps", [(run, step) for step in known]),
        Insert(
            "steps",
            ("step",),
            [(step,) for step in numbers],
            {"run": run, "epoch": epoch, "reported": wall},
            [{"metrics": encode_record(metrics)} for metrics in numbers.values()],
        ),
    ]


def find_lease(connection: sa.Connection, run: str, lease_id: bytes) -> sa.Row[Any] | None:
    """The row of a lease that is no longer in memory."""
    table = schema.leases
    return connection.execute(sa.select(table).where(table.c.run == run, table.c.lease_id == lease_id)).first()


def states_of_lease(connection: sa.Connection, run: str, lease_id: bytes) -> list[tuple[str, str]]:
    """(state, reason) of each rollout that arrived for a lease; empty when its slice never did."""
    table = schema.rollouts
    query = sa.select(table.c.state, table.c.reason).where(table.c.run == run, table.c.lease_id == lease_id)
    return [(row.state, row.reason) for row in connection.execute(query.order_by(table.c.sample))]


def receipts_after(connection: sa.Connection, run: str, peer: str, after: int, limit: int) -> list[Receipt]:
    """A node's receipts behind `after`, in order."""
    table = schema.rollouts
    query = (
        sa.select(
            table.c.receipt_sequence, table.c.lease_id, table.c.sample, table.c.state, table.c.reason, table.c.reward
        )
        .where(table.c.run == run, table.c.peer == peer, table.c.receipt_sequence > after)
        .order_by(table.c.receipt_sequence)
        .limit(limit)
    )
    return [
        Receipt(
            sequence=row.receipt_sequence,
            lease_id=row.lease_id,
            sample=row.sample,
            state=row.state,
            reason=row.reason,
            reward=row.reward,
        )
        for row in connection.execute(query)
    ]


def load_unfinished(connection: sa.Connection, run: str) -> list[RolloutEntry]:
    """Held and admitted rollouts, in the order of arrival."""
    table, lease = schema.rollouts, schema.leases
    content = schema.contents
    columns = (content.c.tokens, content.c.logprobs, content.c.spans, lease.c.account)
    joined = sa.select(table, *columns).outerjoin(content, content.c.id == table.c.id)  # one without is damage
    joined = joined.outerjoin(lease, lease.c.lease_id == table.c.lease_id)
    query = joined.where(table.c.run == run, UNFINISHED).order_by(table.c.id)
    return [
        RolloutEntry(
            id=row.id,
            lease_id=row.lease_id,
            sample=row.sample,
            peer=row.peer,
            kind=row.kind,
            ordinal=row.ordinal,
            version=row.version,
            state=row.state,
            reason=row.reason,
            finish=row.finish,
            tokens=row.tokens,
            logprobs=row.logprobs,
            spans=tuple(unpack_tokens(row.spans).tolist()),
            claimed_reward=row.claimed_reward,
            reward=row.reward,
            details=details_in(row.details),
            sequence=row.admitted_sequence or 0,
            account=row.account,
            in_time=row.in_time is None or bool(row.in_time),
        )
        for row in connection.execute(query)
    ]


def load_steps(connection: sa.Connection, run: str) -> list[StepMetrics]:
    """Every reported step, in order."""
    table = schema.steps
    query = sa.select(table.c.metrics).where(table.c.run == run).order_by(table.c.step)
    return [decode_record(row.metrics, StepMetrics) for row in connection.execute(query)]


def load_manifests(connection: sa.Connection, run: str) -> list[tuple[Signed, float | None]]:
    """Every published manifest, lowest (epoch, version) first, with its T_bcast where it was reached."""
    table = schema.manifests
    query = sa.select(table).where(table.c.run == run).order_by(table.c.epoch, table.c.version)
    return [
        (Signed(payload=row.payload, signature=row.signature), row.broadcast_seconds)
        for row in connection.execute(query)
    ]


def list_events(connection: sa.Connection, *, limit: int, before: int | None = None) -> list[sa.Row[Any]]:
    """The audit log, newest first."""
    table = schema.events
    query = sa.select(*EVENT_COLUMNS).where(AUDIT).order_by(table.c.id.desc()).limit(limit)
    return list(connection.execute(query if before is None else query.where(table.c.id < before)))


def events_behind(connection: sa.Connection, after: int, *, limit: int) -> list[sa.Row[Any]]:
    """The audit log behind `after`, oldest first."""
    table = schema.events
    query = sa.select(*EVENT_COLUMNS).where(AUDIT, table.c.id > after).order_by(table.c.id).limit(limit)
    return list(connection.execute(query))


def newest_event(connection: sa.Connection) -> int:
    """The newest line of the audit log; 0 while it has none."""
    return connection.scalar(sa.select(sa.func.max(schema.events.c.id)).where(AUDIT)) or 0


EVENT_COLUMNS = tuple(schema.events.c[name] for name in ("id", "wall", "actor", "action", "subject", "reason"))
