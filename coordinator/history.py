"""The event log: what a transaction changes, written in the same transaction, and the tables told again from it. Pure,
but for `read_state` and `record_state`.

An event's body is what its transaction did to the tables, in order. `records.record` carries out the changes and writes
the body from the very same values, so log and tables cannot differ by mistake. Bodies leave out what would double the
database (rollouts' `contents`; `CONTENT`: manifests' bytes, steps' metrics) and what it numbers by itself.

    body     msgpack: [change, ...]
    insert   ["+", table, {column: value of all rows}, [column, ...], [[value, ...], ...]]
    update   ["=", table, [key column, ...], [column, ...], [[key, ..., value, ...], ...]]
    delete   ["-", table, [key column, ...], [[key, ...], ...]]

`postings` is not in it: that table is a log itself (`accounts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import sqlalchemy as sa

from . import schema

Row = dict[str, Any]
State = dict[str, dict[tuple[Any, ...], Row]]
"""Rows by table and key, without `CONTENT`."""

KEYS: dict[str, tuple[str, ...]] = {
    "tokens": ("hash",),
    "access": ("hash",),
    "nodes": ("peer",),
    "node_transitions": ("peer", "number"),
    "runs": ("run",),
    "manifests": ("run", "epoch", "version"),
    "leases": ("lease_id",),
    "closed_groups": ("run", "ordinal"),
    "rollouts": ("id",),
    "evaluations": ("run", "version"),
    "steps": ("run", "step"),
    "accounts": ("number",),
    "relays": ("manifest_hash", "receiver", "relay"),
    "appeals": ("number",),
}
"""Every table that the log tells again, with what names a row in it."""

CONTENT: dict[str, frozenset[str]] = {
    "manifests": frozenset({"payload", "signature"}),
    "leases": frozenset({"id"}),
    "steps": frozenset({"metrics"}),
}

YOUNGER: dict[str, Row] = {
    "tokens": {"run": None},
    "nodes": {"price": 0, "run": None, "wanted": None, "bound": None},
    "runs": {"settings": None},
    "leases": {"account": None},
    "rollouts": {"in_time": None},
}
"""Columns that are younger than the log, with what an upgrade gave the rows that were there."""

STATE_ROWS = 1000
"""Rows of an event that records what was there before the log began."""


@dataclass(frozen=True, slots=True)
class Insert:
    """New rows: each has `columns`, in order, and all have `shared`. `left_out` goes to the table only."""

    table: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    shared: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Rows with new values: each is its key, in the order of KEYS, then the values of `columns`."""

    table: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Delete:
    """Rows that go, by their keys."""

    table: str
    rows: Sequence[Sequence[Any]]


Change = Insert | Update | Delete


def insert(table: str, row: Mapping[str, Any], left_out: Mapping[str, Any] | None = None) -> Insert:
    """One new row."""
    return Insert(table, (), [()], row, None if left_out is None else [left_out])


def update(table: str, key: Sequence[Any], values: Mapping[str, Any]) -> Update:
    """One row with new values."""
    return Update(table, list(values), [[*key, *values.values()]])


def encode(changes: Iterable[Change]) -> bytes:
    """The body of an event."""
    body: list[list[Any]] = []
    for change in changes:
        if change.table not in KEYS or not change.rows:
            continue
        if isinstance(change, Insert):
            body.append(["+", change.table, dict(change.shared), change.columns, change.rows])
        elif isinstance(change, Update):
            body.append(["=", change.table, KEYS[change.table], change.columns, change.rows])
        else:
            body.append(["-", change.table, KEYS[change.table], change.rows])
    return bytes(msgpack.packb(body, use_bin_type=True))


def replay(bodies: Iterable[bytes | None], state: State | None = None) -> State:
    """The tables that these events, in the order of their ids, make of `state` (changed in place; None: empty ones).

    Raises ValueError for a body that does not follow from what came before it.
    """
    state = {table: {} for table in KEYS} if state is None else state
    for body in bodies:
        for kind, table, *rest in msgpack.unpackb(body, strict_map_key=False) if body else ():
            rows = state.setdefault(table, {})
            if kind == "+":
                _insert(table, rows, *rest)
            else:
                _change(table, rows, kind, *rest)
    return state


def _insert(
    table: str, rows: dict[tuple[Any, ...], Row], shared: Row, columns: list[str], values: list[list[Any]]
) -> None:
    for each in values:
        row = YOUNGER.get(table, {}) | shared | dict(zip(columns, each, strict=True))
        key = tuple(row[name] for name in KEYS[table])
        if key in rows:
            raise ValueError(f"the event log inserts {table} {key} a second time")
        rows[key] = row


def _change(table: str, rows: dict[tuple[Any, ...], Row], kind: str, keys: list[str], *rest: Any) -> None:
    columns, values = rest if kind == "=" else ([], rest[0])
    for each in values:
        key = tuple(each[: len(keys)])
        if key not in rows:
            raise ValueError(f"the event log changes {table} {key}, which is not there")
        if kind == "-":
            del rows[key]
        else:
            rows[key] |= dict(zip(columns, each[len(keys) :], strict=True))


def read_bodies(connection: sa.Connection) -> Iterable[bytes | None]:
    """Every event's body, the oldest first."""
    table = schema.events
    query = sa.select(table.c.body).where(table.c.body.is_not(None)).order_by(table.c.id)
    return connection.scalars(query.execution_options(yield_per=STATE_ROWS))


def read_state(connection: sa.Connection) -> State:
    """The same of the tables themselves, which may be of an older release."""
    found: State = {}
    for name, keys in KEYS.items():
        columns = _present(connection, name)
        if not columns:
            continue
        rows = [
            YOUNGER.get(name, {}) | dict(zip(columns, row, strict=True)) for row in _rows(connection, name, columns)
        ]
        found[name] = {tuple(row[key] for key in keys): row for row in rows}
    return found


def record_state(connection: sa.Connection) -> None:
    """Put what the tables hold into the log: replay of a ledger that is older than its log begins here."""
    for name in KEYS:
        columns = _present(connection, name)
        for chunk in _rows(connection, name, columns).partitions(STATE_ROWS) if columns else ():
            body = encode([Insert(name, columns, [list(row) for row in chunk])])
            values = {"wall": 0.0, "actor": "coordinator", "action": "state recorded", "subject": name}
            connection.execute(
                sa.insert(schema.events).values(
                    **values, reason="the log of changes begins here", kind="flow", body=body
                )
            )


def _present(connection: sa.Connection, name: str) -> list[str]:
    """The columns that the table has now, of those that the log knows; none where there is no such table yet."""
    inspector = sa.inspect(connection)
    if not inspector.has_table(name):
        return []
    present = {column["name"] for column in inspector.get_columns(name)} - CONTENT.get(name, frozenset())
    return [column.name for column in schema.metadata.tables[name].c if column.name in present]


def _rows(connection: sa.Connection, name: str, columns: Sequence[str]) -> sa.CursorResult[Any]:
    table = schema.metadata.tables[name]
    return connection.execute(sa.select(*(table.c[column] for column in columns)).order_by(*table.primary_key))
