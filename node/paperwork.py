"""Fetching signed statements, sending appeals: beside the work, and never in its way.

Nothing here makes a node leave the pool or stop: what fails is tried again at its next turn. A coordinator that knows
neither statements nor appeals is left alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from echo2.p2p.channel import request
from echo2.p2p.errors import ProtocolError, Refused, SchemaViolation, Unreachable
from echo2.p2p.identity import open_signed
from echo2.p2p.join import ANY_RUN
from echo2.p2p.messages import AppealReply, AppealRequest, StatementReply, StatementRequest
from echo2.p2p.postings import Statement, check_statement

from .spool import SpoolFull

if TYPE_CHECKING:
    from echo2.p2p.join import JoinString
    from echo2.p2p.transport import Transport

    from .config import NodeSettings
    from .papers import Appeal, Papers
    from .situation import Situation

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Between looks for appeals that the owner has put into the home."""

ASK_SECONDS = 60.0
"""Between two asks for what became of open appeals."""

LAST_SECONDS = 5.0
"""For the statement at the end of a `finish`."""

FINAL = frozenset({"not_suspended", "unknown_lease"})
"""Codes by which the coordinator declines an appeal for good."""


class Paperwork:
    """`statements` and `appeals` run side by side."""

    def __init__(
        self, situation: Situation, *, config: NodeSettings, transport: Transport, join: JoinString, papers: Papers
    ) -> None:
        self._situation = situation
        self._config = config
        self._transport = transport
        self._join = join
        self._papers = papers
        self._asked_at = float("-inf")

    async def statements(self) -> None:
        """For ever: bring home what was posted since."""
        while True:
            await self._situation.joined()
            await self._fetch()
            await self._situation.pause(self._config.statements_seconds)

    async def last_statement(self) -> None:
        """Once more, before the node ends."""
        if self._situation.facts.joined:
            with trio.move_on_after(LAST_SECONDS):
                await self._fetch()

    async def appeals(self) -> None:
        """For ever: send what the owner wrote, ask what became of it."""
        while True:
            await self._situation.joined()
            now = self._situation.clock()
            ask = now - self._asked_at >= ASK_SECONDS
            self._asked_at = now if ask else self._asked_at
            try:
                for appeal in self._papers.appeals():
                    theirs = (appeal.coordinator, appeal.run) == (self._join.peer, self._join.run)
                    if theirs and (appeal.state == "unsent" or (ask and appeal.state == "open")):
                        await self._send(appeal)
            except SpoolFull as error:
                self._situation.failed("papers", error)
            await self._situation.pause(LOOK_SECONDS)

    async def _fetch(self) -> None:
        try:
            while await self._page():
                pass
            self._situation.succeeded("statement", "papers")
        except ProtocolError as error:
            self._situation.protocol_errors += 1
            self._situation.failed("statement", error)
        except SpoolFull as error:
            self._situation.failed("papers", error)
        except (Unreachable, Refused) as error:
            log.info("no statement was fetched: %s", error)

    async def _run(self) -> str:
        """The run that the node is in: its join string may leave that to the coordinator."""
        return (await self._situation.joined()).descriptor.run

    async def _page(self) -> bool:
        """One page; whether there are more behind it."""
        after = self._papers.last_posting(self._join.peer)
        ask = StatementRequest(run=await self._run(), after=after)
        reply = await request(self._transport, self._join.coordinator, "statement", ask, StatementReply)
        statement = open_signed(reply.statement, self._join.peer, "statement", Statement)
        if (statement.peer, statement.after) != (self._transport.peer_id, after):
            raise SchemaViolation("the statement is another node's, or of other postings than were asked for")
        fault = check_statement(statement)
        self._papers.keep_statement(self._join.peer, reply.statement, statement)  # a wrong one above all: it is proof
        if fault:
            raise SchemaViolation(f"the coordinator signed a statement that is wrong: {fault}")
        return reply.more and bool(statement.postings)

    async def _send(self, appeal: Appeal) -> None:
        run = await self._run() if appeal.run == ANY_RUN else appeal.run
        message = AppealRequest(run=run, appeal_id=appeal.appeal_id, subject=appeal.subject, text=appeal.text)
        try:
            reply = await request(self._transport, self._join.coordinator, "appeal", message, AppealReply)
            if reply.appeal_id != appeal.appeal_id:
                raise SchemaViolation("the answer is to another appeal than was sent")
            self._papers.answered(reply)
            self._situation.succeeded("appeal")
        except Refused as error:
            if error.code in FINAL:
                self._papers.declined(appeal.appeal_id, error.detail)
            self._situation.failed("appeal", error)
        except ProtocolError as error:
            self._situation.protocol_errors += 1
            self._situation.failed("appeal", error)
        except Unreachable as error:
            log.info("the appeal is sent later: %s", error)
