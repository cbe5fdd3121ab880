"""Join tokens from the command line, beside a coordinator that may be running: both use the same ledger."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from echo2.p2p.errors import Refused
from echo2.p2p.join import TOKEN_CHARACTERS

from . import schema
from .history import insert, update
from .records import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger import Ledger

TOKEN_BYTES = TOKEN_CHARACTERS // 2
"""144 bits as 36 hexadecimal digits: nobody guesses it, and it survives being read aloud."""

HASH_SHOWN = 12
"""Digits of its hash that name a token: 48 bits, and its owner cannot be found from them."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token as the ledger knows it: by the start of its hash. Unix seconds; `expires` None = never."""

    hash_start: str
    uses: int
    used: int
    created: float
    expires: float | None
    run: str | None = None
    """The only run that it lets nodes into; None: any."""


def issue_token(
    ledger: Ledger,
    *,
    uses: int,
    expires_seconds: float | None,
    wall: float,
    entropy: Callable[[int], bytes],
    actor: str,
    reason: str,
    run: str | None = None,
) -> str:
    """A token that lets `uses` new nodes in, into `run` alone unless that is None; the ledger keeps only its hash.

    Raises LedgerUnavailable.
    """
    token = entropy(TOKEN_BYTES).hex()
    expires = None if expires_seconds is None else wall + expires_seconds
    digest = hashlib.sha256(token.encode()).digest()
    with ledger.transaction() as connection:
        row = {"hash": digest, "quota": uses, "used": 0, "expires": expires, "created": wall, "run": run}
        record(
            connection,
            [insert("tokens", row)],
            wall=wall,
            actor=actor,
            action="token made",
            subject=f"{uses} uses" if run is None else f"{uses} uses, for {run}",
            reason=reason,
        )
    return token


def list_tokens(ledger: Ledger) -> list[TokenRow]:
    """Every token ever made, oldest first. Raises LedgerUnavailable."""
    table = schema.tokens
    with ledger.reading() as connection:
        rows = connection.execute(sa.select(table).order_by(table.c.created)).all()
    return [_shown(row) for row in rows]


def revoke_token(ledger: Ledger, hash_start: str, *, wall: float, actor: str, reason: str) -> TokenRow:
    """It lets nobody in from now on; who is in stays. Named by the start of its hash, as it is listed.

    Raises KeyError when there is none, Refused when it counts for nothing already, LedgerUnavailable.
    """
    table = schema.tokens
    with ledger.transaction() as connection:
        rows = connection.execute(sa.select(table).order_by(table.c.created)).all()
        found = [row for row in rows if bytes(row.hash).hex()[:HASH_SHOWN] == hash_start]
        if not found:
            raise KeyError(hash_start)
        (row,) = found[:1]
        if row.used >= row.quota or (row.expires is not None and row.expires <= wall):
            raise Refused("token_over", f"the token {hash_start} is used up or has expired: it lets nobody in")
        change = update("tokens", [row.hash], {"expires": wall})
        record(connection, [change], wall=wall, actor=actor, action="token revoked", subject=hash_start, reason=reason)
    return replace(_shown(row), expires=wall)


def _shown(row: Any) -> TokenRow:
    return TokenRow(bytes(row.hash).hex()[:HASH_SHOWN], row.quota, row.used, row.created, row.expires, row.run)
