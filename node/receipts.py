"""Receipts read back: what the coordinator signed, verified with its public key and nothing else."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from echo2.p2p.errors import ConfigurationError, ProtocolError
from echo2.p2p.identity import open_signed
from echo2.p2p.join import parse_join_string
from echo2.p2p.messages import ReceiptBatch, Signed

from .home import remembered_join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from echo2.p2p.messages import Receipt

HEADER = f"{'run':<16} {'number':>7}  {'lease':<32} {'sample':>6}  {'state':<10} {'reward':>6}  reason"


@dataclass(frozen=True, slots=True)
class Kept:
    """The receipts that verify, with their run, and what is wrong with the batches that do not."""

    receipts: tuple[tuple[str, Receipt], ...]
    bad: tuple[str, ...]

    def lines(self, *, as_json: bool) -> Iterator[str]:
        """One line a receipt, in order; a heading where a person reads."""
        if not as_json and self.receipts:
            yield HEADER
        for run, receipt in self.receipts:
            if as_json:
                yield json.dumps({"run": run} | receipt.model_dump() | {"lease_id": receipt.lease_id.hex()})
                continue
            reward = "-" if receipt.reward is None else f"{receipt.reward:.3g}"
            yield (
                f"{run:<16} {receipt.sequence:>7}  {receipt.lease_id.hex():<32} {receipt.sample:>6}  "
                f"{receipt.state:<10} {reward:>6}  {receipt.reason}"
            ).rstrip()

    def verdict(self, signer: str) -> str:
        """The last line."""
        good = f"{len(self.receipts)} receipts, signed by {signer} for this node"
        return "; ".join([good, *(f"NOT VERIFIED: {reason}" for reason in self.bad)])


def coordinator_of(home: Path) -> str:
    """The coordinator whose run the node in `home` joined. Raises ConfigurationError."""
    return parse_join_string(remembered_join(home)).peer


def kept_receipts(spool: Path) -> list[tuple[str, Signed]]:
    """(run, batch as signed) of a spool that a running node may be using: read only. Raises ConfigurationError."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(spool))}?mode=ro", uri=True)) as db:
            rows = db.execute("SELECT run, payload, signature FROM receipts ORDER BY run, last").fetchall()
    except sqlite3.Error as error:
        raise ConfigurationError(f"there are no receipts to read in {spool}: {error}") from error
    return [(run, Signed(payload=payload, signature=signature)) for run, payload, signature in rows]


def checked(batches: Iterable[tuple[str, Signed]], signer: str, peer: str) -> Kept:
    """Open each (run, batch) under the coordinator's key; it must be of that run and for `peer`."""
    receipts: list[tuple[str, Receipt]] = []
    bad: list[str] = []
    for run, signed in batches:
        try:
            batch = open_signed(signed, signer, "receipts", ReceiptBatch)
        except ProtocolError as error:
            bad.append(f"a batch of {run}: {error}")
            continue
        if (batch.run, batch.peer) != (run, peer):
            bad.append(f"a batch of {run} is of the run {batch.run}, for {batch.peer}")
            continue
        receipts += [(run, receipt) for receipt in batch.receipts]
    return Kept(tuple(receipts), tuple(bad))
