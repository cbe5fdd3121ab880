"""The ledger of credits and payments: appended to, verified, exported, and told to nodes. The chain is `p2p.postings`.

Appending takes the database's writing lock, so that the coordinator and the command line beside it get one chain.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import sqlalchemy as sa
from pydantic import ValidationError

from echo2.p2p.errors import ConfigurationError, ProtocolError
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import Signed
from echo2.p2p.postings import ORIGIN, POSTINGS_MAX, Chain, Head, Posting, Statement, posting_hash

from . import schema
from .cells import check
from .database import lock_for_writing
from .records import storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from echo2.p2p.identity import Identity
    from echo2.p2p.postings import Kind, Unit

FIELDS = tuple(Posting.model_fields)
BYTES_FIELDS = ("previous", "hash")

EXPORT_FORMAT = "echo2/postings/1"

POSTING_BYTES = 512
"""What a posting takes on the wire beside its texts, rounded up."""

STATEMENT_BYTES_MAX = 1_500_000
"""Of one statement, below its frame's bound: a reason is an operator's text, up to four bytes a character."""

ROWS = 1000
"""Read at once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is to be posted."""

    run: str
    peer: str
    kind: Kind
    unit: Unit
    amount_micros: int
    quantity: int
    actor: str
    reason: str


def append(connection: sa.Connection, entries: Sequence[Entry], *, wall: float) -> list[Posting]:
    """Post them, in the caller's transaction. Raises pydantic's ValidationError (a ValueError) for one that is none."""
    if not entries:
        return []
    lock_for_writing(connection)
    number, previous = newest(connection)
    made: list[Posting] = []
    for entry in entries:
        number += 1
        values: dict[str, Any] = {
            "id": number,
            "run": entry.run,
            "peer": entry.peer,
            "kind": entry.kind,
            "unit": entry.unit,
            "amount_micros": entry.amount_micros,
            "quantity": entry.quantity,
            "actor": entry.actor,
            "reason": storable(entry.reason),
            "wall_micros": round(wall * 1e6),
            "previous": previous,
        }
        previous = posting_hash(list(values.values()))
        made.append(Posting(**values, hash=previous))
    connection.execute(sa.insert(schema.postings), [posting.model_dump() for posting in made])
    return made


def read(connection: sa.Connection, *, peer: str | None = None, after: int = 0) -> Iterator[Posting]:
    """Postings behind `after`, in order: all, or one node's. Raises ValueError naming a row that cannot be one."""
    table = schema.postings
    query = sa.select(table).where(table.c.id > after).order_by(table.c.id)
    if peer is not None:
        query = query.where(table.c.peer == peer)
    for row in connection.execute(query.execution_options(yield_per=ROWS)).mappings():
        values = {name: bytes(row[name]) if name in BYTES_FIELDS else row[name] for name in FIELDS}
        yield _posting(values)


def verify(connection: sa.Connection) -> Chain:
    """The whole chain, from the first posting to the first that is wrong."""
    return _checked(read(connection))


def newest(connection: sa.Connection) -> tuple[int, bytes]:
    """The newest posting and its hash. Raises ValueError when that is no hash."""
    table = schema.postings
    row = connection.execute(sa.select(table.c.id, table.c.hash).order_by(table.c.id.desc()).limit(1)).first()
    if row is None:
        return 0, ORIGIN
    check(row, (table.c.id, table.c.hash))
    return row.id, bytes(row.hash)


def balances(connection: sa.Connection, peer: str) -> dict[str, int]:
    """What a node's postings come to, by unit, in micro units."""
    table = schema.postings
    total = sa.func.sum(table.c.amount_micros)
    query = sa.select(table.c.unit, total).where(table.c.peer == peer).group_by(table.c.unit)
    return {unit: int(amount) for unit, amount in connection.execute(query)}


def page(connection: sa.Connection, peer: str, *, after: int) -> tuple[tuple[Posting, ...], bool]:
    """A node's postings behind `after`, as many as one statement takes; whether there are others behind them."""
    found: list[Posting] = []
    left = STATEMENT_BYTES_MAX
    for posting in read(connection, peer=peer, after=after):
        left -= len(posting.reason.encode()) + len(posting.actor.encode()) + POSTING_BYTES
        if len(found) == POSTINGS_MAX or left < 0:
            return tuple(found), True
        found.append(posting)
    return tuple(found), False


def said(peer: str, after: int, postings: tuple[Posting, ...], head: tuple[int, bytes], *, wall: float) -> Statement:
    """The statement of a page, and of the chain's newest posting."""
    number, digest = head
    return Statement(
        peer=peer, after=after, postings=postings, head_id=number, head_hash=digest, wall_micros=round(wall * 1e6)
    )


def statement(connection: sa.Connection, identity: Identity, peer: str, *, after: int, wall: float) -> Signed:
    """A node's postings behind `after`, at most one page, signed."""
    postings, _ = page(connection, peer, after=after)
    return identity.sign("statement", said(peer, after, postings, newest(connection), wall=wall))


def export_csv(connection: sa.Connection, file: TextIO) -> int:
    """One line a posting, hashes in hexadecimal. How many."""
    writer = csv.writer(file)
    writer.writerow(FIELDS)
    count = 0
    for posting in read(connection):
        writer.writerow(_shown(posting).values())
        count += 1
    return count


def export_json(connection: sa.Connection, file: TextIO, identity: Identity, *, wall: float) -> int:
    """The chain, and its end signed by the coordinator: `check_export` verifies it anywhere. How many postings."""
    number, digest = newest(connection)
    head = identity.sign("chain", Head(head_id=number, head_hash=digest, wall_micros=round(wall * 1e6)))
    facts = {"format": EXPORT_FORMAT, "signer": identity.peer_id}
    facts |= {"head": head.payload.hex(), "signature": head.signature.hex()}
    file.write(json.dumps(facts)[:-1] + ', "postings": [')
    count = 0
    for posting in read(connection):
        file.write(",\n" if count else "\n")
        file.write(json.dumps(_shown(posting)))
        count += 1
    file.write("\n]}\n")
    return count


def check_export(file: TextIO, signer: str | None = None) -> tuple[Chain, str]:
    """An exported chain (JSON), without the ledger: the chain and who signed its end. `fault` says what is wrong.

    `signer`: the peer id that must have signed it. Raises ConfigurationError for a file that is no export.
    """
    try:
        found = json.load(file)
        if found["format"] != EXPORT_FORMAT:
            raise ConfigurationError(
                f"an export of the format {found['format']!r}; this software knows {EXPORT_FORMAT}"
            )
        signed = Signed(payload=bytes.fromhex(found["head"]), signature=bytes.fromhex(found["signature"]))
        rows = [row | {name: bytes.fromhex(row[name]) for name in BYTES_FIELDS} for row in found["postings"]]
        said = str(found["signer"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"not an export of postings: {type(error).__name__}: {error}"[:300]) from error
    chain = _checked(_posting(row) for row in rows)
    try:
        head = open_signed(signed, signer or said, "chain", Head)
    except ProtocolError as error:
        chain.fault = chain.fault or f"its end is not signed by {signer or said}: {error}"
        return chain, said
    if not chain.fault and (chain.count, chain.head) != (head.head_id, head.head_hash):
        chain.fault = f"it ends with posting {chain.count}, its signer says with posting {head.head_id}"
    return chain, said


def extends(connection: sa.Connection, earlier: Chain) -> str:
    """Why the ledger's chain does not go on from one exported earlier; empty when it does."""
    if not earlier.count:
        return ""
    table = schema.postings
    digest = connection.scalar(sa.select(table.c.hash).where(table.c.id == earlier.count))
    if digest is None:
        return f"posting {earlier.count} of the export is not in the ledger any more"
    if bytes(digest) != earlier.head:
        return f"posting {earlier.count} is another one than in the export: the chain was written anew"
    return ""


def _checked(postings: Iterable[Posting]) -> Chain:
    chain = Chain()
    try:
        for posting in postings:
            if not chain.add(posting):
                break
    except ValueError as error:
        chain.fault = str(error)
    return chain


def _posting(values: dict[str, Any]) -> Posting:
    try:
        return Posting(**values)
    except (ValidationError, TypeError) as error:
        number = values.get("id")
        raise ValueError(f"posting {number} was changed: it holds what no posting can") from error


def _shown(posting: Posting) -> dict[str, Any]:
    values = posting.model_dump()
    return values | {name: values[name].hex() for name in BYTES_FIELDS}
