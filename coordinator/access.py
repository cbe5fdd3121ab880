"""Access tokens: who a person or program is over REST, and what it may do. The ledger keeps only their SHA-256.

Two tokens are not in the ledger, and work while the database is away: the operator's, the first, whose hash is in a
file of the state folder; and that of the commands on the coordinator's own machine (`operator_token`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa

from echo2.p2p.errors import Refused

from . import schema
from .database import lock_for_writing
from .history import insert, update
from .ledger import LedgerUnavailable
from .records import record
from .rest_roles import ROLES, Role

if TYPE_CHECKING:
    from .ledger import Ledger

TOKEN_BYTES = 32
"""256 bits: cannot be guessed, so a fast hash is enough."""

OPERATOR = "operator"
"""The name of the operator's own token."""

COMMAND_LINE = "command line"
"""The name of whoever uses a command on the coordinator's machine. No other token can have it: it has a space."""

RESERVED = frozenset({OPERATOR, "coordinator", "learner", "auditor"})
"""Names that the audit log has for others."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]*$"
NAME_CHARACTERS_MAX = 48

EXPIRES_HOURS_MAX = 24 * 366.0 * 10

REMEMBERED_MAX = 256
REMEMBERED_SECONDS = 600.0
"""While the database is away, a token that was good so shortly before is still good: to see what is the matter, with
reads. No change can be made without the ledger."""

Denied = Literal["unknown", "revoked", "expired"]
"""Why a token counts for nothing."""


@dataclass(frozen=True, slots=True)
class AccessRow:
    """A token as the ledger knows it. Unix seconds; `expires` None = never, `revoked` None = it counts."""

    name: str
    role: Role
    created: float
    expires: float | None
    revoked: float | None

    def denied(self, wall: float) -> Denied | None:
        """Why it does not count now."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and wall >= self.expires else None


class AccessBook:
    """Made, found and revoked here. `own`: operators' tokens that are not in the ledger, name and SHA-256 of each."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        own: Mapping[str, bytes],
        wall: Callable[[], float],
        entropy: Callable[[int], bytes],
    ) -> None:
        self._ledger = ledger
        self._own = dict(own)
        self._wall = wall
        self._entropy = entropy
        self._remembered: dict[bytes, tuple[AccessRow, float]] = {}

    def find(self, digest: bytes) -> AccessRow | Denied:
        """Whose token has this SHA-256. Raises LedgerUnavailable."""
        for name, known in self._own.items():
            if hmac.compare_digest(digest, known):
                return AccessRow(name, "operator", 0.0, None, None)
        row = self._row(digest)
        if row is None:
            return "unknown"
        return row.denied(self._wall()) or row

    def create(self, name: str, role: Role, *, expires_seconds: float | None, actor: str, reason: str) -> str:
        """A new token, shown once. Raises Refused for a name in use, and LedgerUnavailable."""
        if name in RESERVED:
            raise Refused("name_reserved", f"the name {name!r} is the audit log's for others; choose another")
        raw = self._entropy(TOKEN_BYTES)
        token = base64.urlsafe_b64encode(raw).decode().rstrip("=")
        wall = self._wall()
        expires = None if expires_seconds is None else wall + expires_seconds
        values = {"name": name, "role": role, "created": wall, "expires": expires, "revoked": None}
        with self._ledger.transaction() as connection:
            lock_for_writing(connection)
            for _, known in _rows(connection, schema.access.c.name == name):
                if known.denied(wall) is None:
                    raise Refused(
                        "name_in_use", f"{name!r} has a token that counts; revoke it first, or choose another"
                    )
            change = insert("access", {"hash": hashlib.sha256(token.encode()).digest(), **values})
            subject = f"{name}: {role}"
            record(connection, [change], wall=wall, actor=actor, action="access given", subject=subject, reason=reason)
        return token

    def revoke(self, name: str, *, actor: str, reason: str) -> AccessRow:
        """It counts for nothing from now on. Raises KeyError when `name` has none that counts; LedgerUnavailable."""
        wall = self._wall()
        with self._ledger.transaction() as connection:
            lock_for_writing(connection)
            found = [(key, row) for key, row in _rows(connection, schema.access.c.name == name) if not row.denied(wall)]
            if not found:
                raise KeyError(name)
            changes = [update("access", [key], {"revoked": wall}) for key, _ in found]
            record(connection, changes, wall=wall, actor=actor, action="access revoked", subject=name, reason=reason)
        self._remembered.clear()
        return found[-1][1]

    def rows(self) -> list[AccessRow]:
        """Every token ever made, the oldest first. Raises LedgerUnavailable."""
        with self._ledger.reading() as connection:
            return [row for _, row in _rows(connection)]

    def _row(self, digest: bytes) -> AccessRow | None:
        try:
            with self._ledger.reading() as connection:
                found = _rows(connection, schema.access.c.hash == digest)
        except LedgerUnavailable:
            row, at = self._remembered.get(digest, (None, float("-inf")))
            if row is None or self._wall() - at > REMEMBERED_SECONDS:
                raise
            return row
        self._remembered.pop(digest, None)
        if not found:
            return None
        self._remembered[digest] = found[0][1], self._wall()
        if len(self._remembered) > REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]
        return found[0][1]


def _rows(connection: sa.Connection, *where: sa.ColumnElement[bool]) -> list[tuple[bytes, AccessRow]]:
    table = schema.access
    query = sa.select(table).where(*where).order_by(table.c.created, table.c.name)
    return [(bytes(row.hash), _row_of(row)) for row in connection.execute(query)]


def _row_of(row: Any) -> AccessRow:
    role: Role = row.role if row.role in ROLES else ROLES[0]  # of a later release, or damage: the least
    return AccessRow(row.name, role, row.created, row.expires, row.revoked)
