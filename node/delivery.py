"""Handing rollouts in and bringing receipts home. What is in the spool is sent until it is acknowledged.

A node that was moved from one run of its coordinator's to another still owes the first its slices, and is owed its
receipts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from echo2.p2p.channel import request
from echo2.p2p.errors import OwnFrameTooLarge, ProtocolError, Refused, SchemaViolation, Unreachable
from echo2.p2p.identity import open_signed
from echo2.p2p.log_lines import short, tell
from echo2.p2p.messages import ReceiptBatch, ReceiptsReply, ReceiptsRequest, SubmitReply, SubmitRequest

from .lifecycle import Blocked, Cleared, State
from .limits import Backoff
from .spool import SpoolFull

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from echo2.p2p.join import JoinString
    from echo2.p2p.messages import Slice
    from echo2.p2p.transport import Transport

    from .config import NodeSettings
    from .membership import Member
    from .situation import Situation
    from .spool import Spool

log = logging.getLogger(__name__)


class Delivery:
    """`submit` and `collect` run side by side."""

    def __init__(
        self,
        situation: Situation,
        *,
        config: NodeSettings,
        transport: Transport,
        join: JoinString,
        spool: Spool,
        member: Member,
        rng: random.Random,
    ) -> None:
        self._situation = situation
        self._config = config
        self._transport = transport
        self._join = join
        self._spool = spool
        self._member = member
        self._rng = rng
        self._submit_backoff = Backoff(rng)
        self._receipts_backoff = Backoff(rng)
        self._refused: dict[str, tuple[Backoff, float]] = {}
        """Runs whose slices the coordinator does not take now, and when they are offered again."""
        self._runs = set(spool.joined(join.peer))
        if join.run_wanted is not None:
            self._runs.add(join.run_wanted)

    @property
    def known(self) -> bool:
        """Whether this home has worked for a run of this coordinator's before."""
        return any(self._spool.knows(run) for run in self._runs)

    def welcomed(self, run: str) -> None:
        """The coordinator has put the node into this run."""
        self._runs.add(run)
        try:
            self._spool.join(run, self._join.peer)
        except SpoolFull as error:  # it is asked again by the next welcome
            self._situation.failed("spool", error)

    @property
    def flushed(self) -> bool:
        """Whether everything generated for this coordinator's runs is acknowledged."""
        return not any(self._spool.waiting(run) for run in self._runs)

    def _next(self) -> tuple[str, float]:
        """The run whose slices are sent next, and when (our clock): refused ones last."""
        waiting = (run for run in self._runs if self._spool.waiting(run))
        found = ((self._refused[run][1] if run in self._refused else float("-inf"), run) for run in waiting)
        at, run = min(found, default=(float("-inf"), ""))
        return run, at

    async def submit(self) -> None:
        """For ever: send what is spooled, oldest first, until it is acknowledged."""
        while True:
            await self._situation.until(lambda: not self.flushed)
            membership = await self._situation.joined()
            run, at = self._next()
            if at > self._situation.clock():
                await self._situation.pause(at - self._situation.clock(), unless=self._another_than(run))
                continue
            wait: float
            try:
                await self._submit(run, self._spool.pending(run))
                self._submit_backoff.reset()
                self._refused.pop(run, None)
                continue
            except Unreachable as error:
                self._member.lost(membership, error)
                wait = self._submit_backoff.next()
            except Refused as error:
                self._not_taken(run, error, error.retry_seconds)
                continue
            except ProtocolError as error:
                self._situation.protocol_errors += 1
                self._not_taken(run, error, None)
                continue
            except SpoolFull as error:
                self._situation.failed("spool", error)
                self._situation.happened(Blocked("disk", str(error)))
                wait = self._submit_backoff.next()
            await self._situation.pause(wait)

    def _another_than(self, run: str) -> Callable[[], bool]:
        return lambda: self._next()[0] != run

    def _not_taken(self, run: str, error: Exception, retry_seconds: float | None) -> None:
        """The slices of this run wait; those of others do not."""
        self._situation.failed("submit", error)
        backoff = self._refused[run][0] if run in self._refused else Backoff(self._rng)
        self._refused[run] = (backoff, self._situation.clock() + backoff.next(retry_seconds))

    async def _submit(self, run: str, slices: Sequence[Slice]) -> None:
        message = SubmitRequest(run=run, slices=tuple(slices))
        try:
            reply = await request(self._transport, self._join.coordinator, "rollouts", message, SubmitReply)
        except OwnFrameTooLarge as error:
            if len(slices) > 1:
                await self._submit(run, slices[:1])
                return
            # It can never be sent: out of the way, with the reason in the history.
            self._spool.give_up(slices[0].lease_id, str(error))
            self._situation.counts = self._spool.counts()
            self._situation.failed("submit", error)
            return
        sent = {piece.lease_id for piece in slices}
        if any(ack.lease_id not in sent for ack in reply.acks):
            raise SchemaViolation("an acknowledgement for a slice that was not sent")
        if not self._spool.acknowledge(reply.acks):
            raise SchemaViolation("the coordinator acknowledged none of the slices sent")
        self._situation.counts = self._spool.counts()
        self._situation.happened(Cleared("disk"))
        self._situation.notify()
        self._situation.succeeded("submit", "spool", "rejected")
        taken = [short(ack.lease_id) for ack in reply.acks if ack.state != "rejected"]
        if taken:
            tell(log, logging.INFO, "leases_returned", "%d leases are acknowledged", len(taken), leases=taken)
        for ack in reply.acks:
            if ack.state == "rejected":
                self._situation.failed("rejected", ack.reason)
                rejected = [short(ack.lease_id)]
                tell(log, logging.WARNING, "leases_rejected", "a lease was rejected: %s", ack.reason, leases=rejected)

    async def collect(self) -> None:
        """For ever: receipts of what was acknowledged and is not decided yet."""
        while True:
            membership = await self._situation.joined()
            wait = self._config.receipts_seconds
            if self._situation.state is State.FINISHING:
                wait = min(wait, 1.0)
            try:
                for run in sorted(self._runs):
                    while self._spool.knows(run) and await self._collect(run):
                        pass
                self._receipts_backoff.reset()
                self._situation.succeeded("receipts")
            except Unreachable as error:
                self._member.lost(membership, error)
                wait = self._receipts_backoff.next()
            except Refused as error:
                self._situation.failed("receipts", error)
                wait = self._receipts_backoff.next(error.retry_seconds)
            except ProtocolError as error:
                self._situation.protocol_errors += 1
                self._situation.failed("receipts", error)
                wait = self._receipts_backoff.next(wait)
            except SpoolFull as error:
                self._situation.failed("spool", error)
                wait = self._receipts_backoff.next(wait)
            await self._situation.pause(wait)
            await self._situation.until(lambda: self._situation.counts.undecided > 0)

    async def _collect(self, run: str) -> bool:
        """One page of receipts; whether there are more behind it."""
        after = self._spool.receipts_after(run)
        ask = ReceiptsRequest(run=run, after_sequence=after)
        reply = await request(self._transport, self._join.coordinator, "receipts", ask, ReceiptsReply)
        batch = open_signed(reply.batch, self._join.peer, "receipts", ReceiptBatch)
        if (batch.run, batch.peer) != (run, self._transport.peer_id):
            raise SchemaViolation("receipts of another run or node")
        sequences = [receipt.sequence for receipt in batch.receipts]
        if sequences != sorted(set(sequences)) or (sequences and sequences[0] <= after):
            raise SchemaViolation("receipts out of order")
        kept = self._spool.keep_receipts(reply.batch, batch)
        self._situation.counts = self._spool.counts()
        self._situation.notify()
        return reply.more and kept > 0
