"""Whether cells of the ledger are as this software writes them.

SQLite keeps what it is given, of any type in any column, and a bit that a disk has turned is still a value. Taken into
memory, such a value would come up as a fault of something else, long after.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

import sqlalchemy as sa

from echo2.p2p import postings

from . import schema
from .leases import Kind, Purpose
from .node_states import EVENTS, STATES
from .records import EventKind, RolloutState
from .run_book import RunLifeState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WORDS: dict[sa.Column[Any], tuple[str, ...]] = {
    schema.nodes.c.role: ("node", "learner"),
    schema.nodes.c.state: STATES,
    schema.nodes.c.back: STATES,
    schema.node_transitions.c.event: EVENTS,
    schema.node_transitions.c.from_state: ("new", *STATES),
    schema.node_transitions.c.to_state: STATES,
    schema.runs.c.state: get_args(RunLifeState),
    schema.leases.c.kind: get_args(Kind),
    schema.rollouts.c.kind: get_args(Kind),
    schema.rollouts.c.state: get_args(RolloutState),
    schema.rollouts.c.finish: ("stop", "length"),
    schema.evaluations.c.purpose: get_args(Purpose),
    schema.events.c.kind: get_args(EventKind),
    schema.postings.c.kind: get_args(postings.Kind),
    schema.postings.c.unit: get_args(postings.Unit),
    schema.appeals.c.state: ("open", "upheld", "refused"),
}
"""Columns that hold one of a few words."""

_MAY_BE_NEGATIVE = frozenset({schema.postings.c.amount_micros})


def sound(rows: Iterable[sa.Row[Any]], table: sa.Table) -> Iterator[sa.Row[Any]]:
    """The rows, whole ones of this table, each looked at. Raises ValueError."""
    for row in rows:
        check(row, table.columns)
        yield row


def check(record: object, columns: Iterable[sa.Column[Any]]) -> None:
    """Look at what `record` has under the names of these columns. Raises ValueError."""
    for column in columns:
        # A row is a tuple, and `row.count` is a tuple's method.
        check_cell(column, record._mapping[column] if isinstance(record, sa.Row) else getattr(record, column.name))


def check_cell(column: sa.Column[Any], value: object) -> None:
    """By its column's type, length and words; whole numbers but amounts are never negative here. Raises ValueError."""
    if value is None and column.nullable:
        return
    kind = column.type.python_type
    good = isinstance(value, int | float if kind is float else kind)
    if good and kind is int and isinstance(value, int):
        good = value >= 0 or column in _MAY_BE_NEGATIVE
    if good and isinstance(value, bytes) and isinstance(column.type, sa.LargeBinary):
        good = column.type.length in {None, len(value)}
    if not good or (column in _WORDS and value not in _WORDS[column]):
        raise ValueError(f"{column} is {value!r:.60}")


def texts(value: str) -> tuple[str, ...]:
    """A list of texts kept as JSON. Raises ValueError."""
    found = json.loads(value)
    if not (isinstance(found, list) and all(isinstance(one, str) for one in found)):
        raise ValueError(f"{value!r:.60} is no list of texts")
    return tuple(found)
