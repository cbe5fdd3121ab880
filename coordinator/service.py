"""The coordinator: one desk for each kind of request, the tasks beside them, and what operators may see and change.

| protocol   | desk           | | protocol | desk          | | beside them | every           |
|------------|----------------|-|----------|---------------|-|-------------|-----------------|
| hello      | AdmissionDesk  | | receipts | IntakeDesk    | | scoring     | held rollout    |
| heartbeat  | HeartbeatDesk  | | admitted | LearnerDesk   | | timers      | TICK_SECONDS    |
| manifest   | BroadcastDesk  | | report   | LearnerDesk   | |             |                 |
| leases     | LeaseDesk      | | publish  | LearnerDesk   | | leases      | news of work    |
| tokenizer  | TokenizerDesk  | | statement| StatementDesk | |             |                 |
| rollouts   | IntakeDesk     | | appeal   | AppealDesk    | |             |                 |

A desk decides, commits to the ledger, changes memory and answers, in one go between two awaits: no locks.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from echo2.p2p.channel import answering, hold_against
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import (
    AdmittedRequest,
    AppealRequest,
    Heartbeat,
    Hello,
    LearnerReport,
    LeaseRequest,
    ManifestRequest,
    Message,
    PublishRequest,
    ReceiptsRequest,
    StatementRequest,
    SubmitRequest,
    TokenizerRequest,
)
from echo2.p2p.unread import Unread
from echo2.tasks.catalog import make_task

from . import schema
from .admission import AdmissionDesk
from .appeals import AppealDesk
from .broadcast_view import broadcast_view
from .broadcasts import BroadcastDesk
from .heartbeats import HeartbeatDesk
from .intake_desk import IntakeDesk
from .learner_desk import LearnerDesk
from .lease_desk import LeaseDesk
from .ledger import SECRET_BYTES, LedgerUnavailable
from .loading import load_pay, load_pool, load_run
from .measures import Measures
from .node_life import NodeLife
from .node_records import transitions_of
from .node_states import DELIVERING
from .office import WAIT_SECONDS_MAX, Office
from .overview import Overview
from .pay_clock import PayClock
from .pool import DEAD_HEARTBEATS, LATE_HEARTBEATS, Tally
from .prompts import FolderText, PromptBook
from .records import events_behind, list_events, newest_event
from .run_life import RunLife
from .scheduling import Scheduler
from .scoring import ScoringTask
from .served import served_to_peer
from .statement_desk import StatementDesk
from .tokenizer_desk import TokenizerDesk
from .tokens import issue_token, list_tokens, revoke_token
from .views import EventView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import sqlalchemy as sa

    from echo2.p2p.channel import Allowed, Answer
    from echo2.p2p.errors import ProtocolError
    from echo2.p2p.identity import Identity
    from echo2.p2p.postings import Unit
    from echo2.p2p.transport import ProtocolName, Transport
    from echo2.tasks.sandbox import SandboxTask
    from echo2.tasks.scorer import Scorer
    from echo2.tasks.task import Task, TaskSpec
    from echo2.tasks.token_text import ModelText

    from .broadcast_view import BroadcastView
    from .config import CoordinatorConfig
    from .ledger import Ledger
    from .node_states import NodeEvent
    from .tokens import TokenRow
    from .views import AppealView, NodeView, PoolView, RunView, StepView, TransitionView

Q = TypeVar("Q", bound=Message)

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""How often overdue leases and dead nodes are looked for: well below the shortest lease worth giving."""

STRANGERS_UNREAD_MAX = 256
"""Requests of strangers being read, 16 MiB of 64 KiB each. All nodes of a pool that join at once fit."""

EVENTS_MAX = 1000
"""Lines of the audit log shown at once."""


class CoordinatorService:
    """One coordinator with its run. Loads the ledger when made; serves in `run`.

    `task` and `text` stand in for the catalogue's task and the model folder's tokeniser, in tests and simulations.
    `proved` picks, of the addresses that a node claims, those it was found at; without it all are believed.
    Raises ConfigurationError when the run cannot be what the configuration says.
    """

    def __init__(
        self,
        *,
        config: CoordinatorConfig,
        identity: Identity,
        transport: Transport,
        ledger: Ledger,
        scorer: Scorer,
        clock: Callable[[], float],
        wall: Callable[[], float],
        entropy: Callable[[int], bytes],
        task: Task | SandboxTask | None = None,
        text: ModelText | None = None,
        proved: Callable[[str, tuple[str, ...]], tuple[str, ...]] | None = None,
    ) -> None:
        self._transport = transport
        self._scorer = scorer
        self._unread = Unread(STRANGERS_UNREAD_MAX)
        self.measures = Measures(ledger=ledger.measures)
        loaded_task, loaded_text = task or _task(config.run.spec), text or FolderText(config.run.model_dir)

        def load() -> tuple[Office, NodeLife, Scheduler]:
            prompts = PromptBook(
                run=config.run.name,
                task=loaded_task,
                spec=config.run.spec,
                text=loaded_text,
                seed=config.run.seed,
                secret=ledger.secret(entropy(SECRET_BYTES)),
            )
            tally = Tally()
            pool = load_pool(ledger, config)
            run = load_run(ledger, config, prompts, pool, tally, now=clock(), wall=wall())
            pay = load_pay(ledger, config, pool, run, now=clock(), wall=wall())
            office = Office(config, identity, ledger, clock, wall, entropy, prompts, pool, run, tally, scorer, pay)
            office.measures = self.measures
            if proved is not None:
                office.proved = proved
            life = NodeLife(office, transport)
            return office, life, Scheduler(office, life)

        self._load = load
        self._set_up(*load())

    def _set_up(self, office: Office, life: NodeLife, scheduler: Scheduler) -> None:
        """Desks around what the ledger holds."""
        self._office = office
        self._node_life = life
        self._life = RunLife(office)
        self._overview = Overview(office, self._life)
        self._admission = AdmissionDesk(office, life, self._transport)
        self._heartbeats = HeartbeatDesk(office, life)
        self._broadcasts = BroadcastDesk(office)
        self._leases = LeaseDesk(office)
        self._tokenizer = TokenizerDesk(office)
        self._intake = IntakeDesk(office)
        self._statements = StatementDesk(office)
        self._appeals = AppealDesk(office)
        self._learner = LearnerDesk(office, self._broadcasts, self._life.settle)
        self._scoring = ScoringTask(office, self._scorer, self._life.settle)
        self._scheduler = scheduler
        self._pay_clock = PayClock(office)

    async def run(self) -> None:
        """Serve until cancelled. After a commit of which nobody knows whether it holds, begin anew from the ledger."""
        while True:
            self._open_desks()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._scoring.run)
                nursery.start_soon(self._leases.run)
                await self._tick_until_in_doubt()
                nursery.cancel_scope.cancel()
            before, leases = self._office, self._leases
            self._set_up(*await self._loaded_again())
            before.retire()
            leases.retire()
            log.warning("the database is back: everything was read from it again, as after a restart")

    def _open_desks(self) -> None:
        office = self._office
        self._serve("hello", Hello, self._admission.hello, office.stranger)
        self._serve("heartbeat", Heartbeat, self._heartbeats.heartbeat, office.not_a_node)
        self._serve("manifest", ManifestRequest, self._broadcasts.manifest, office.not_a_node)
        self._serve("leases", LeaseRequest, self._leases.lease, office.not_a_node)
        self._serve("tokenizer", TokenizerRequest, self._tokenizer.piece, office.not_a_node)
        self._serve("rollouts", SubmitRequest, self._intake.submit, office.not_a_node)
        self._serve("receipts", ReceiptsRequest, self._intake.receipts, office.not_a_node)
        self._serve("statement", StatementRequest, self._statements.statement, office.not_a_node)
        self._serve("appeal", AppealRequest, self._appeals.appeal, office.not_a_node)
        self._serve("admitted", AdmittedRequest, self._learner.admitted, office.not_the_learner)
        self._serve("report", LearnerReport, self._learner.report, office.not_the_learner)
        self._serve("publish", PublishRequest, self._learner.publish, office.not_the_learner)

    # asked and told by the transport's side

    def admitted(self, peer: str) -> bool:
        """Whether `peer` may have the relay and the dial back: the learner, and nodes that take part."""
        node = self._office.pool.nodes.get(peer)
        return peer == self._office.config.run.learner or (node is not None and node.state in DELIVERING)

    def forget_plan(self) -> None:
        """Other addresses are proved than before: the next asker gets a plan with them."""
        self._office.run.forget_plans()

    # seen by operators and researchers

    def pool_view(self) -> PoolView:
        """The pool as a whole."""
        addresses = self._office.config.announce or self._transport.addresses
        return self._overview.pool(addresses, self._scorer.confinement)

    def nodes_view(self) -> list[NodeView]:
        """Every node that memory holds, in the order of admission."""
        return self._overview.nodes()

    def node_view(self, peer: str) -> NodeView:
        """One node. Raises KeyError when it was never admitted."""
        return self._overview.node(peer)

    def runs_view(self) -> list[RunView]:
        """Every run: one, in this version."""
        return [self._overview.run()]

    def run_view(self, run: str) -> RunView:
        """One run. Raises KeyError when there is none of this name."""
        self._check_run(run)
        return self._overview.run()

    def events_view(self, *, limit: int = 100, before: int | None = None) -> list[EventView]:
        """The audit log, newest first. Raises Refused while the ledger cannot be read."""
        with self._office.ledger.reading() as connection:
            rows = list_events(connection, limit=min(limit, EVENTS_MAX), before=before)
        return self._events(rows)

    def events_behind(self, after: int, *, limit: int) -> list[EventView]:
        """The audit log behind `after`, oldest first. Raises Refused while the ledger cannot be read."""
        with self._office.ledger.reading() as connection:
            rows = events_behind(connection, after, limit=min(limit, EVENTS_MAX))
        return self._events(rows)

    def newest_event(self) -> int:
        """The newest line of the audit log; 0 while it has none. Raises Refused while the ledger cannot be read."""
        with self._office.ledger.reading() as connection:
            return newest_event(connection)

    def steps_view(self, run: str, *, after: int, limit: int) -> list[StepView]:
        """What was reported of the steps behind `after`, in order. Raises KeyError when there is no such run."""
        self._check_run(run)
        return self._overview.steps(after, limit)

    def tokens_view(self) -> list[TokenRow]:
        """Every token that lets nodes in, the oldest first. Raises Refused while the ledger cannot be read."""
        return list_tokens(self._office.ledger)

    def broadcast_view(self, limit: int) -> BroadcastView:
        """Where each node is with the newest snapshot; at most `limit` nodes, those that lack it first."""
        return broadcast_view(self._office, limit)

    def decisions_view(self) -> list[dict[str, Any]]:
        """Who was activated and released; the newest first, with their numbers since the ledger was last loaded."""
        return self._scheduler.told()

    def appeals_view(self) -> list[AppealView]:
        """Open appeals first, then those that were answered. Raises Refused while the ledger cannot be read."""
        return self._appeals.view()

    # changed by operators, each on record

    def resolve_appeal(
        self, id_: int, upheld: bool, *, actor: str, reason: str, amount_micros: int = 0, unit: Unit = "usd"
    ) -> AppealView:
        """Answer an appeal, for good. Raises KeyError or Refused; see `AppealDesk.resolve`."""
        return self._appeals.resolve(id_, upheld, actor=actor, reason=reason, amount_micros=amount_micros, unit=unit)

    def create_token(self, *, uses: int, expires_seconds: float | None, actor: str, reason: str) -> str:
        """A token that lets `uses` new nodes in. Shown once: the ledger keeps its hash."""
        office = self._office
        token = issue_token(
            office.ledger,
            uses=uses,
            expires_seconds=expires_seconds,
            wall=office.wall(),
            entropy=office.entropy,
            actor=actor,
            reason=reason,
        )
        log.info("a token for %d nodes was made by %s: %s", uses, actor, reason)
        return token

    def revoke_token(self, hash_start: str, *, actor: str, reason: str) -> TokenRow:
        """It lets nobody in any more. Raises KeyError for an unknown one, Refused for one that is over."""
        office = self._office
        return revoke_token(office.ledger, hash_start, wall=office.wall(), actor=actor, reason=reason)

    def admit_node(self, peer: str, *, actor: str, reason: str) -> None:
        """A node that has applied takes part. Raises KeyError for an unknown node, Refused for one that has not."""
        self._change_node(peer, "admitted", actor, reason)

    def drain_node(self, peer: str, *, actor: str, reason: str) -> None:
        """No new leases; what it holds it finishes. Until restored. Raises KeyError or Refused."""
        self._change_node(peer, "drained", actor, reason)

    def suspend_node(self, peer: str, *, actor: str, reason: str, expires_seconds: float | None = None) -> None:
        """No more leases; what it delivered and is not consumed is withdrawn. Raises KeyError or Refused.

        After `expires_seconds` its probation begins anew; None: not before it is restored.
        """
        self._change_node(peer, "suspended", actor, reason, expires_seconds)

    def ban_node(self, peer: str, *, actor: str, reason: str, expires_seconds: float | None = None) -> None:
        """As suspended, and nothing is served to it: it is told why, then refused. Raises KeyError or Refused."""
        self._change_node(peer, "banned", actor, reason, expires_seconds)

    def unban_node(self, peer: str, *, actor: str, reason: str) -> None:
        """A banned node's probation begins anew. Raises KeyError or Refused."""
        self._change_node(peer, "unbanned", actor, reason)

    def restore_node(self, peer: str, *, actor: str, reason: str) -> None:
        """A suspended or drained node takes part again. Raises KeyError or Refused."""
        self._change_node(peer, "restored", actor, reason)

    def transitions_view(self, peer: str) -> list[TransitionView]:
        """How a node came to its state, the newest first. Raises KeyError or Refused."""
        self._known_node(peer)
        return transitions_of(self._office.ledger, peer)

    def pause_run(self, run: str, *, actor: str, reason: str) -> None:
        """No new leases until resumed. Raises KeyError or Refused."""
        self._check_run(run)
        self._life.change("paused", actor=actor, reason=reason)

    def resume_run(self, run: str, *, actor: str, reason: str) -> None:
        """Leases flow again. Raises KeyError or Refused."""
        self._check_run(run)
        self._life.change("running", actor=actor, reason=reason)

    def stop_run(self, run: str, *, actor: str, reason: str) -> None:
        """End the run for good. Raises KeyError or Refused."""
        self._check_run(run)
        self._life.change("stopped", actor=actor, reason=reason)

    # helpers

    def _events(self, rows: Iterable[sa.Row[Any]]) -> list[EventView]:
        with self._office.ledger.loading(schema.events):
            return [
                EventView(
                    id=row.id,
                    wall_seconds=row.wall,
                    actor=row.actor,
                    action=row.action,
                    subject=row.subject,
                    reason=row.reason,
                )
                for row in rows
            ]

    def _serve(self, protocol: ProtocolName, kind: type[Q], answer: Answer[Q], allowed: Allowed) -> None:
        counted = served_to_peer(protocol, answer, self.measures)
        handler = answering(
            kind, counted, self._complain, wait_seconds=WAIT_SECONDS_MAX, allowed=allowed, unread=self._unread
        )
        self._transport.set_handler(protocol, handler)

    def _complain(self, peer: str, error: ProtocolError) -> None:
        self._office.complain(peer, error)
        hold_against(self._transport, peer, error)

    async def _tick_until_in_doubt(self) -> None:
        while not self._office.ledger.in_doubt:
            self._leases.expire()
            self._note_silence()
            self._node_life.look()
            self._scheduler.look()
            self._pay_clock.look()
            self._heartbeats.note_installed()
            self._life.settle()
            if self._office.ledger.trouble:  # what is shown must not be an old story
                with suppress(LedgerUnavailable):
                    self._office.ledger.probe()
            await trio.sleep(TICK_SECONDS)

    def _note_silence(self) -> None:
        office, now = self._office, self._office.clock()
        for node in office.pool.nodes.values():
            if node.seen_at is not None:
                heartbeats = (now - node.seen_at) / office.config.heartbeat_seconds
                self.measures.silent(node.peer, heartbeats, late=LATE_HEARTBEATS, dead=DEAD_HEARTBEATS)

    async def _loaded_again(self) -> tuple[Office, NodeLife, Scheduler]:
        """What the ledger holds, as soon as it can be read. Until then every change is refused."""
        ledger = self._office.ledger
        while True:
            with suppress(LedgerUnavailable):
                ledger.probe()
                ledger.in_doubt = False
                try:
                    return self._load()
                except LedgerUnavailable:
                    ledger.in_doubt = True
            await trio.sleep(TICK_SECONDS)

    def _check_run(self, run: str) -> None:
        if run != self._office.run.name:
            raise KeyError(run)

    def _known_node(self, peer: str) -> None:
        """Have it in memory. Raises KeyError for a key that was never let in."""
        if self._admission.find(peer) is None:
            raise KeyError(peer)

    def _change_node(
        self, peer: str, event: NodeEvent, actor: str, reason: str, expires_seconds: float | None = None
    ) -> None:
        self._known_node(peer)
        self._node_life.change(peer, event, actor=actor, reason=reason, expires_seconds=expires_seconds)


def _task(spec: TaskSpec) -> Task | SandboxTask:
    try:
        return make_task(spec)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
