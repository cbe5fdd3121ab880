"""Rows of the ledger, written and read. Every function works inside the caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa

from echo2.p2p.codec import decode_record, encode_record, pack_tokens, unpack_tokens
from echo2.p2p.messages import Receipt, Signed, StepMetrics

from . import schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .leases import LeaseEntry

UNFINISHED = sa.text("state IN ('held', 'admitted')")
"""As the partial index has it: with bound parameters SQLite would not see that the index serves."""

Details = Mapping[str, float]
"""Measures of an episode beside its reward, by name."""

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


def add_event(
    connection: sa.Connection, *, wall: float, actor: str, action: str, subject: str = "", reason: str = ""
) -> None:
    """A line of the audit log."""
    connection.execute(
        sa.insert(schema.events).values(wall=wall, actor=actor, action=action, subject=subject, reason=reason[:512])
    )


def add_leases(
    connection: sa.Connection, run: str, leases: Sequence[LeaseEntry], *, duration_seconds: float, wall: float
) -> None:
    """Record leases before they are sent."""
    connection.execute(
        sa.insert(schema.leases),
        [
            {
                "run": run,
                "lease_id": lease.lease_id,
                "peer": lease.peer,
                "kind": lease.kind,
                "ordinal": lease.span.ordinal,
                "sample_first": lease.span.first,
                "sample_count": lease.span.count,
                "version": lease.version,
                "manifest_hash": lease.manifest_hash,
                "tokens_max": lease.tokens_max,
                "duration_seconds": duration_seconds,
                "granted": wall,
            }
            for lease in leases
        ],
    )


def _details_out(details: Details | None) -> str | None:
    return json.dumps(dict(details), sort_keys=True) if details else None


def details_in(text: str | None) -> Details | None:
    """The column `details` of a rollout."""
    return json.loads(text) if text else None


_INSERT_ROLLOUT = sa.insert(schema.rollouts)


def add_rollouts(connection: sa.Connection, run: str, verdicts: Iterable[Verdict], *, wall: float) -> None:
    """Record what arrived: held, or already terminal."""
    rows = [
        {
            "id": verdict.entry.id,
            "run": run,
            "lease_id": verdict.entry.lease_id,
            "sample": verdict.entry.sample,
            "peer": verdict.entry.peer,
            "kind": verdict.entry.kind,
            "ordinal": verdict.entry.ordinal,
            "version": verdict.entry.version,
            "state": verdict.state,
            "reason": verdict.reason,
            "finish": verdict.entry.finish,
            "tokens": verdict.entry.tokens,
            "logprobs": verdict.entry.logprobs,
            "spans": pack_tokens(verdict.entry.spans),
            "claimed_reward": verdict.entry.claimed_reward,
            "received": wall,
            "receipt_sequence": verdict.receipt_sequence,
        }
        for verdict in verdicts
    ]
    if rows:
        connection.execute(_INSERT_ROLLOUT, rows)


_UPDATE_ROLLOUT = (
    sa.update(schema.rollouts)
    .where(schema.rollouts.c.id == sa.bindparam("key"))
    .values(
        {
            name: sa.bindparam(f"new_{name}")
            for name in ("state", "reason", "reward", "details", "admitted_sequence", "step", "receipt_sequence")
        }
    )
)


def change_rollouts(connection: sa.Connection, verdicts: Iterable[Verdict]) -> None:
    """Record new states of rollouts that are held or admitted."""
    rows = [
        {
            "key": verdict.entry.id,
            "new_state": verdict.state,
            "new_reason": verdict.reason,
            "new_reward": verdict.entry.reward if verdict.reward is None else verdict.reward,
            "new_details": _details_out(verdict.entry.details if verdict.details is None else verdict.details),
            "new_admitted_sequence": verdict.sequence or verdict.entry.sequence or None,
            "new_step": verdict.step,
            "new_receipt_sequence": verdict.receipt_sequence,
        }
        for verdict in verdicts
    ]
    if rows:
        connection.execute(_UPDATE_ROLLOUT, rows)


def close_groups(connection: sa.Connection, run: str, groups: Mapping[int, str]) -> None:
    """Record groups that need nothing more, with the reason."""
    if groups:
        connection.execute(
            sa.insert(schema.closed_groups),
            [{"run": run, "ordinal": ordinal, "reason": reason} for ordinal, reason in groups.items()],
        )


def put_steps(connection: sa.Connection, run: str, epoch: int, steps: Sequence[StepMetrics], *, wall: float) -> None:
    """Record steps; one that was trained again after a crash replaces what was lost."""
    if not steps:
        return
    numbers = {metrics.step: metrics for metrics in steps}
    table = schema.steps
    connection.execute(sa.delete(table).where(table.c.run == run, table.c.step.in_(list(numbers))))
    connection.execute(
        sa.insert(table),
        [
            {"run": run, "step": step, "epoch": epoch, "metrics": encode_record(metrics), "reported": wall}
            for step, metrics in numbers.items()
        ],
    )


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
    table = schema.rollouts
    query = sa.select(table).where(table.c.run == run, UNFINISHED).order_by(table.c.id)
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
    query = sa.select(table).order_by(table.c.id.desc()).limit(limit)
    return list(connection.execute(query if before is None else query.where(table.c.id < before)))


def last_of_each(connection: sa.Connection, actor: str, actions: Sequence[str]) -> dict[str, str]:
    """Of the audit log: the last of these actions of an actor for each subject."""
    table = schema.events
    newest = (
        sa.select(sa.func.max(table.c.id))
        .where(table.c.actor == actor, table.c.action.in_(actions))
        .group_by(table.c.subject)
    )
    return {row.subject: row.action for row in connection.execute(sa.select(table).where(table.c.id.in_(newest)))}
