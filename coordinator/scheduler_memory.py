"""What the scheduler remembers over a restart, from its lines in the audit log.

| what            | how much                                                                                       |
|-----------------|------------------------------------------------------------------------------------------------|
| who works       | the last word on each node                                                                     |
| holds           | whose mind was changed within `hold_periods`, by the coordinator's wall clock                  |
| decisions       | the last `LINES_MAX` lines, as `GET /v1/decisions` shows them: in words, without their numbers |

How long a deviation has lasted is measured anew: what is measured of the nodes begins anew as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from . import schema
from .records import AUDIT

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

LINES_MAX = 200
"""A line is of one node: the decisions of hours in most pools, and one page of the audit log in all."""


def last_changes(connection: sa.Connection, actor: str, actions: Sequence[str]) -> dict[str, tuple[str, float]]:
    """The last of these actions of an actor for each subject, and when, in Unix seconds."""
    table = schema.events
    newest = (
        sa.select(sa.func.max(table.c.id))
        .where(AUDIT, table.c.actor == actor, table.c.action.in_(actions))
        .group_by(table.c.subject)
    )
    found = sa.select(table.c.subject, table.c.action, table.c.wall).where(table.c.id.in_(newest))
    return {row.subject: (row.action, row.wall) for row in connection.execute(found)}


def told_decisions(
    connection: sa.Connection,
    actor: str,
    actions: Mapping[str, str],
    run: str,
    subjects: Container[str] | None = None,
) -> list[dict[str, Any]]:
    """Decisions by their lines, the newest first. `actions`: of a decision, by the word in the log. `subjects`: only
    lines of these, where the log has those of several runs."""
    table = schema.events
    lines = connection.execute(
        sa.select(table.c.wall, table.c.action, table.c.subject, table.c.reason)
        .where(AUDIT, table.c.actor == actor, table.c.action.in_(list(actions)))
        .order_by(table.c.id.desc())
        .limit(LINES_MAX)
    )
    found: list[dict[str, Any]] = []
    for line in lines:
        if subjects is not None and line.subject not in subjects:
            continue
        cause, _, reason = line.reason.partition(": ")
        said = {
            "wall_seconds": line.wall, "run": run, "action": actions[line.action], "cause": cause, "reason": reason,
        }  # fmt: skip
        if not (found and all(found[-1][key] == value for key, value in said.items())):
            found.append({**said, "chosen": []})
        if said["action"] != "none":  # else its subject is the run
            found[-1]["chosen"].insert(0, line.subject)
    return found
