"""Statements of credits and payments: what the coordinator signed for this node, checked without the network."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from echo2.p2p.codec import decode_record
from echo2.p2p.errors import ConfigurationError, ProtocolError
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import Signed
from echo2.p2p.postings import Statement, check_statement, contradiction
from echo2.p2p.settings import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from echo2.p2p.postings import Posting

    from .receipts import Kept

STATEMENT_BYTES_MAX = 4 << 20
"""Above that of a full statement: 512 postings of at most 3 KiB, twice as long in hexadecimal."""

MICROS = 1_000_000

ALWAYS_CREDITED = frozenset({"consumed", "evaluated"})
CREDITED = ALWAYS_CREDITED | {"stale", "withdrawn"}
"""States of rollouts that are credited, the last two only if it was not their node's fault."""


def read_statement(path: Path, signer: str) -> Statement:
    """A statement's file, as `echo2-coordinator ledger statement` writes it. Raises ConfigurationError."""
    text = read_text(path, "statement", bytes_max=STATEMENT_BYTES_MAX)
    try:
        signed = decode_record(bytes.fromhex(text), Signed)
        return open_signed(signed, signer, "statement", Statement)
    except (ValueError, ProtocolError) as error:
        raise ConfigurationError(f"{path} is no statement signed by {signer}: {error}") from error


def opened(kept: Iterable[Signed], signer: str) -> list[Statement]:
    """Those that the node fetched. Raises ConfigurationError when one is not what was signed."""
    try:
        return [open_signed(signed, signer, "statement", Statement) for signed in kept]
    except ProtocolError as error:
        raise ConfigurationError(f"a statement kept here was changed since it was fetched: {error}") from error


def gaps(pages: Sequence[Statement]) -> list[str]:
    """Where pages, in order, do not follow from each other: each begins behind the last posting of the one before."""
    found = []
    last = 0
    for page in pages:
        if page.after > last:
            found.append(f"a page is missing here: postings behind {last}, up to {page.after}")
        last = max([last, page.after, *(posting.id for posting in page.postings)])
    return found


def reconciled(statements: Iterable[Statement], kept: Kept) -> Iterator[str]:
    """How many rollouts of each run and state are credited, and how many receipts say so; in words if not all are."""
    credited: Counter[tuple[str, str]] = Counter()
    for posting in {posting.id: posting for one in statements for posting in one.postings}.values():
        if (posting.kind, posting.unit) == ("credit", "credit"):
            credited[posting.run, posting.reason] += posting.quantity
    receipts: Counter[tuple[str, str]] = Counter((run, receipt.state) for run, receipt in kept.receipts)
    for run, state in sorted({*credited, *((run, state) for run, state in receipts if state in CREDITED)}):
        paid, told = credited[run, state], receipts[run, state]
        words = f"{run}: {told} receipts say {state}, {paid} are credited"
        if paid == told:
            yield f"{words}: they agree"
        elif paid > told:
            yield f"{words}: the receipts of {paid - told} are not here (not fetched yet, or in another home)"
        elif not paid:
            yield f"{words}: NONE IS CREDITED; the operator's rate for them may be 0"
        elif state in ALWAYS_CREDITED:
            yield (
                f"{words}: {told - paid} ARE NOT. A newer statement may have them; if it has not, "
                "`echo2-node appeal LEASE-ID ...`"
            )
        else:
            yield f"{words}: the other {told - paid} came after their lease's time, or were a suspended node's"


def faults(statements: Sequence[Statement], peer: str) -> list[str]:
    """What is wrong with statements whose signatures hold; of several, also what they say differently."""
    found = [f"a statement for {one.peer}, not for this node" for one in statements if one.peer != peer]
    found += filter(None, map(check_statement, statements))
    differently = contradiction(statements)
    return [*found, f"they contradict each other: {differently}"] if differently else found


def lines(statements: Iterable[Statement]) -> Iterator[str]:
    """One line a posting, in order, each once; then what they come to."""
    postings: dict[int, Posting] = {posting.id: posting for one in statements for posting in one.postings}
    totals: Counter[str] = Counter()
    for number, posting in sorted(postings.items()):
        totals[posting.unit] += posting.amount_micros
        yield (
            f"{number:>9}  {posting.run:<16} {posting.kind:<10} {amount(posting.amount_micros):>16} {posting.unit:<6}  "
            f"{posting.reason}"
        )
    yield f"{len(postings)} postings: " + (", ".join(f"{amount(sum_)} {unit}" for unit, sum_ in totals.items()) or "-")


def amount(micros: int) -> str:
    """Millionths as people read them, exactly."""
    whole, rest = divmod(abs(micros), MICROS)
    return f"{'-' if micros < 0 else ''}{whole}.{rest:06d}"
