"""Credits and payments as a chain: what one posting says, its hash, and how anybody checks it without a network. Pure.

Each posting's hash covers its fields and the hash of the one before it, so that none can be changed, taken away or
slipped in later without every hash behind it changing too:

    hash = SHA-256("echo2/posting/1" NUL msgpack([id, run, peer, kind, unit, amount_micros, quantity, actor, reason,
                                                  wall_micros, previous]))

The first one's `previous` is 32 zero bytes. Amounts are integers of a millionth of their unit: sums are exact. A
coordinator could write the whole chain anew; it cannot take back a statement that it signed. A node keeps the
statements it gets: two that say different things of one posting, each signed, prove it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Literal

import msgpack
from pydantic import Field

from .messages import Count, Digest, Name, PeerId, Record, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

AMOUNT_MICROS_MAX = 2**53
"""Nine billion units: far above any balance, and exact in every format and language that reads an export."""

POSTINGS_MAX = 512
"""In one statement."""

ORIGIN = bytes(32)
"""What stands before the first posting."""

_DOMAIN = b"echo2/posting/1\0"

Kind = Literal["credit", "relay", "payment", "adjustment"]
Unit = Literal["credit", "usd"]


class Posting(Record):
    """One line. `amount_micros` is negative when something is taken back, or paid out of what was earned."""

    id: Annotated[int, Field(ge=1, le=2**53)]
    run: Name
    peer: PeerId
    kind: Kind
    unit: Unit
    amount_micros: Annotated[int, Field(ge=-AMOUNT_MICROS_MAX, le=AMOUNT_MICROS_MAX)]
    quantity: Count
    actor: Annotated[str, Field(max_length=64)]
    reason: Text
    wall_micros: Count
    previous: Digest
    hash: Digest


class Statement(Record):
    """A node's postings behind `after`, signed by the coordinator (label `statement`), with the chain's newest then."""

    peer: PeerId
    after: Count
    postings: Annotated[tuple[Posting, ...], Field(max_length=POSTINGS_MAX)]
    head_id: Count
    head_hash: Digest
    wall_micros: Count


class Head(Record):
    """The chain's newest posting, signed by the coordinator (label `chain`): what an export ends with."""

    head_id: Count
    head_hash: Digest
    wall_micros: Count


def posting_hash(values: Sequence[object]) -> bytes:
    """The hash of a posting's fields in their order, `previous` the last."""
    return hashlib.sha256(_DOMAIN + msgpack.packb(list(values), use_bin_type=True)).digest()


def hash_of(posting: Posting) -> bytes:
    """The hash that a posting must have."""
    return posting_hash([getattr(posting, name) for name in Posting.model_fields if name != "hash"])


class Chain:
    """Checks postings one after the other, from the first. `fault` names the first that is wrong."""

    def __init__(self) -> None:
        self.count = 0
        self.head = ORIGIN
        self.fault = ""

    def add(self, posting: Posting) -> bool:
        """Whether it is the next one of the chain, unaltered. After a fault nothing is."""
        if self.fault:
            return False
        told = f"posting {posting.id} ({posting.kind} of {posting.amount_micros} micro {posting.unit}, {posting.peer})"
        if posting.id != self.count + 1:
            missing = self.count + 1
            self.fault = f"posting {missing} is missing: {told} comes next"
        elif posting.previous != self.head:
            self.fault = f"{told} does not follow from the one before it"
        elif posting.hash != hash_of(posting):
            self.fault = f"{told} was changed: its contents do not have its hash"
        else:
            self.count, self.head = posting.id, posting.hash
        return not self.fault


def check_statement(statement: Statement) -> str:
    """What is wrong with a statement whose signature holds; empty when nothing is. Its gaps are others' postings."""
    before: Posting | None = None
    for posting in statement.postings:
        if posting.peer != statement.peer:
            return f"posting {posting.id} is another node's"
        if posting.hash != hash_of(posting):
            return f"posting {posting.id} was changed: its contents do not have its hash"
        if posting.id <= (before.id if before else statement.after):
            return f"posting {posting.id} is out of order"
        if before is not None and posting.id == before.id + 1 and posting.previous != before.hash:
            return f"posting {posting.id} does not follow from posting {before.id}"
        if posting.id > statement.head_id or (posting.id == statement.head_id and posting.hash != statement.head_hash):
            return f"posting {posting.id} is not of the chain that ends with {statement.head_id}"
        before = posting
    return ""


def contradiction(statements: Iterable[Statement]) -> str:
    """What two signed statements say differently; empty when they agree. It is a proof against their signer."""
    known: dict[int, set[str]] = {}
    for statement in statements:
        said = [(posting.id, posting.hash) for posting in statement.postings]
        said += [(posting.id - 1, posting.previous) for posting in statement.postings if posting.id > 1]
        said += [(statement.head_id, statement.head_hash)] if statement.head_id else []
        for number, digest in said:
            known.setdefault(number, set()).add(digest.hex())
    number, digests = next(((n, said) for n, said in sorted(known.items()) if len(said) > 1), (0, set()))
    return f"posting {number} has {len(digests)} hashes: {' and '.join(sorted(digests))}" if digests else ""
