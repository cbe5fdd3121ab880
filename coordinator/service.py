"""The coordinator: one desk for each kind of request, the tasks beside them, and what operators may see and change.

Hello is for all runs; every other request goes to the desks of one (`run_desks`).

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
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from echo2.p2p.channel import answering, hold_against
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.p2p.join import ANY_RUN
from echo2.p2p.messages import (
    AdmittedRequest,
    AppealRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LearnerReport,
    LeaseRequest,
    ManifestRequest,
    Message,
    PublishReply,
    PublishRequest,
    ReceiptsRequest,
    StatementRequest,
    SubmitRequest,
    TokenizerRequest,
)
from echo2.p2p.unread import Unread

from . import schema
from .admission import AdmissionDesk
from .broadcast_view import broadcast_view
from .config import RUNS_MAX, check_apart
from .created_runs import is_known, kept_settings
from .ledger import LedgerUnavailable
from .measures import Measures
from .node_records import transitions_of
from .node_states import DELIVERING
from .office import WAIT_SECONDS_MAX
from .opening import Opener, Served, tools_of
from .pool import DEAD_HEARTBEATS, LATE_HEARTBEATS
from .pool_overview import PoolOverview
from .records import add_event, events_behind, list_events, newest_event
from .run_desks import open_desks
from .scheduling import DECISIONS_REMEMBERED
from .served import served_to_peer
from .tokens import issue_token, list_tokens, revoke_token
from .views import EventView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    import sqlalchemy as sa

    from echo2.p2p.channel import Allowed, Answer
    from echo2.p2p.errors import ProtocolError
    from echo2.p2p.identity import Identity
    from echo2.p2p.postings import Unit
    from echo2.p2p.transport import ProtocolName, Transport
    from echo2.tasks.sandbox import SandboxTask
    from echo2.tasks.scorer import Scorer
    from echo2.tasks.task import Task
    from echo2.tasks.token_text import ModelText

    from .broadcast_view import BroadcastView
    from .config import CoordinatorConfig, RunConfig
    from .house import House
    from .ledger import Ledger
    from .node_life import NodeLife
    from .node_states import NodeEvent
    from .office import Office
    from .opening import RunTools
    from .placement import Placement
    from .run_desks import RunDesks
    from .scheduling import Scheduler
    from .tokens import TokenRow
    from .views import AppealView, NodeView, PoolView, RunView, StepView, TransitionView

Q = TypeVar("Q", bound=Message)
OfRun = TypeVar(
    "OfRun",
    ManifestRequest,
    LeaseRequest,
    TokenizerRequest,
    SubmitRequest,
    ReceiptsRequest,
    StatementRequest,
    AppealRequest,
    AdmittedRequest,
    LearnerReport,
)
"""Requests that name their run."""

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""How often overdue leases and dead nodes are looked for: well below the shortest lease worth giving."""

STRANGERS_UNREAD_MAX = 256
"""Requests of strangers being read, 16 MiB of 64 KiB each. All nodes of a pool that join at once fit."""

EVENTS_MAX = 1000
"""Lines of the audit log shown at once."""


class CoordinatorService:
    """One coordinator with its runs. Loads the ledger when made; serves in `run`.

    `task` and `text` stand in for the catalogue's task and the model folder's tokeniser, in tests and simulations;
    `tools` has those of a run that has others than `scorer`, `task` and `text`, and `open_tools` makes them for a run
    that is created under way. `created`: runs of the settings that were created over REST, with these, as JSON.
    `proved` picks, of the addresses that a node claims, those it was found at; without it all are believed.
    Raises ConfigurationError when a run cannot be what the configuration says.
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
        tools: Mapping[str, RunTools] | None = None,
        created: Mapping[str, str] | None = None,
        open_tools: Callable[[RunConfig], AbstractAsyncContextManager[RunTools]] | None = None,
    ) -> None:
        self._config = config
        self._transport = transport
        self._unread = Unread(STRANGERS_UNREAD_MAX)
        self.measures = Measures(ledger=ledger.measures)
        self._served = {
            run.name: Served(
                run,
                (tools or {}).get(run.name) or tools_of(run, scorer, task, text),
                (created or {}).get(run.name),
            )
            for run in config.all_runs
        }
        self._opener = Opener(config, identity, transport, ledger, clock, wall, entropy, self.measures, proved)
        self._open_tools = open_tools or partial(_given_tools, scorer, task, text)
        self._nursery: trio.Nursery | None = None
        self._hosts: trio.Nursery | None = None
        self._set_up(*self._opener.open(self._served))

    def _set_up(self, house: House, life: NodeLife, placement: Placement, schedulers: dict[str, Scheduler]) -> None:
        """Desks around what the ledger holds."""
        self._house = house
        self._node_life = life
        self._placement = placement
        self._overview = PoolOverview(house)
        self._admission = AdmissionDesk(house, life, placement, self._transport)
        self._desks = {name: open_desks(house.offices[name], life, schedulers[name]) for name in house.offices}

    @property
    def _office(self) -> Office:
        """Of the first run: where what belongs to no single run is done."""
        return self._house.first

    @property
    def _scheduler(self) -> Scheduler:
        return self._first.scheduler

    @property
    def _first(self) -> RunDesks:
        return next(iter(self._desks.values()))

    async def run(self) -> None:
        """Serve until cancelled. After a commit of which nobody knows whether it holds, begin anew from the ledger."""
        async with trio.open_nursery() as self._hosts:
            await self._serve_for_ever()

    async def _serve_for_ever(self) -> None:
        while True:
            self._answer()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for desks in self._desks.values():
                    desks.start(nursery)
                await self._tick_until_in_doubt()
                nursery.cancel_scope.cancel()
            self._nursery = None
            before, left = self._house, list(self._desks.values())
            self._set_up(*await self._loaded_again())
            before.retire()
            for desks in left:
                desks.leases.retire()
            log.warning("the database is back: everything was read from it again, as after a restart")

    async def create_run(self, run: RunConfig, *, actor: str, reason: str) -> RunView:
        """Serve one run more from now on, and after a restart. Raises Refused for one that cannot be beside the others
        or while the ledger cannot be written, ConfigurationError for a task that cannot be used."""
        self._check_beside(run)
        if self._hosts is None:
            raise Refused("starting", "the coordinator is starting", 1.0)
        await self._hosts.start(self._host, run, actor, reason)
        return self.run_view(run.name)

    async def _host(self, run: RunConfig, actor: str, reason: str, *, task_status: Any) -> None:
        """A created run has its tools for as long as the coordinator serves."""
        async with self._open_tools(run) as tools:
            self._check_beside(run)  # another one may have been created meanwhile
            self._add_run(run, tools, actor=actor, reason=reason)
            task_status.started()
            await trio.sleep_forever()

    def _check_beside(self, run: RunConfig) -> None:
        if is_known(self._house.ledger, run.name):
            raise Refused("run_exists", f"the ledger has a run {run.name!r} already; take another name")
        if len(self._served) >= RUNS_MAX:
            raise Refused(
                "too_many_runs", f"this coordinator has {len(self._served)} runs, which is as many as it takes"
            )
        if self._admission.find(run.learner) is not None:
            raise Refused(
                "learner_is_a_node",
                f"{run.learner} is a node of this pool; a learner needs a key of its own (another --home)",
            )
        try:
            check_apart([*(other.config for other in self._served.values()), run])
        except ValueError as error:
            raise Refused("run_exists", str(error)) from error

    def _add_run(self, run: RunConfig, tools: RunTools, *, actor: str, reason: str) -> None:
        served = Served(run, tools, kept_settings(run))
        house = self._house
        try:
            scheduler = self._opener.open_another(house, self._node_life, served)
        except ConfigurationError as error:
            raise Refused("run_terms", str(error)) from error
        self._served[run.name] = served
        desks = self._desks[run.name] = open_desks(house.offices[run.name], self._node_life, scheduler)
        if self._nursery is not None:
            desks.start(self._nursery)
        with suppress(LedgerUnavailable), house.ledger.transaction() as connection:
            facts = {"actor": actor, "action": "run created", "subject": run.name, "reason": reason}
            add_event(connection, wall=house.wall(), **facts)
        log.info("the run %s was created by %s: %s", run.name, actor, reason)

    def _answer(self) -> None:
        house, by_run = self._house, self._by_run
        self._serve("hello", Hello, self._admission.hello, house.stranger)
        self._serve("heartbeat", Heartbeat, self._heartbeat, house.not_a_node)
        self._serve("manifest", ManifestRequest, by_run(lambda desks: desks.broadcasts.manifest), house.not_a_node)
        self._serve("leases", LeaseRequest, by_run(lambda desks: desks.leases.lease), house.not_a_node)
        self._serve("tokenizer", TokenizerRequest, by_run(lambda desks: desks.tokenizer.piece), house.not_a_node)
        self._serve("rollouts", SubmitRequest, by_run(lambda desks: desks.intake.submit), house.not_a_node)
        self._serve("receipts", ReceiptsRequest, by_run(lambda desks: desks.intake.receipts), house.not_a_node)
        self._serve("statement", StatementRequest, by_run(lambda desks: desks.statements.statement), house.not_a_node)
        self._serve("appeal", AppealRequest, by_run(lambda desks: desks.appeals.appeal), house.not_a_node)
        self._serve("admitted", AdmittedRequest, by_run(lambda desks: desks.learner.admitted), house.not_the_learner)
        self._serve("report", LearnerReport, by_run(lambda desks: desks.learner.report), house.not_the_learner)
        self._serve("publish", PublishRequest, self._publish, house.not_the_learner)

    def _by_run(self, pick: Callable[[RunDesks], Answer[OfRun]]) -> Answer[OfRun]:
        """The desk of the run that a request names. Raises Refused where that is not there."""

        async def answer(peer: str, message: OfRun) -> Message:
            return await pick(self._of(message.run))(peer, message)

        return answer

    def _of(self, run: str) -> RunDesks:
        return self._desks[self._house.office(run).run.name]

    async def _heartbeat(self, peer: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """It names its run under its signature: the desk of the node's run opens it, and says if it is of another."""
        office = self._house.of_node(self._house.pool.nodes.get(peer))
        return await self._desks[office.run.name].heartbeats.heartbeat(peer, heartbeat)

    async def _publish(self, peer: str, request: PublishRequest) -> PublishReply:
        """A key is the learner of one run."""
        office = self._house.of_learner(peer)
        if office is None:
            raise self._house.not_a_learner(peer)
        return await self._desks[office.run.name].learner.publish(peer, request)

    # asked and told by the transport's side

    def admitted(self, peer: str) -> bool:
        """Whether `peer` may have the relay and the dial back: learners, and nodes that take part."""
        node = self._house.pool.nodes.get(peer)
        return self._house.of_learner(peer) is not None or (node is not None and node.state in DELIVERING)

    def forget_plan(self) -> None:
        """Other addresses are proved than before: the next asker gets a plan with them."""
        self._house.forget_plans()

    # seen by operators and researchers

    def pool_view(self) -> PoolView:
        """The pool as a whole."""
        addresses = self._office.config.announce or self._transport.addresses
        layers = [served.tools.scorer.confinement for served in self._served.values()]
        common = tuple(layer for layer in layers[0] if all(layer in others for others in layers))
        return self._overview.pool(addresses, common)

    def nodes_view(self) -> list[NodeView]:
        """Every node that memory holds, in the order of admission."""
        return self._overview.nodes()

    def nodes_of(self, run: str) -> list[NodeView]:
        """Those that work for a run or have done so, with what they did for it. Raises KeyError."""
        return self._overview.nodes_of(self._desks[run].office)

    def node_view(self, peer: str) -> NodeView:
        """One node. Raises KeyError when it was never admitted."""
        return self._overview.node(peer)

    def runs_view(self) -> list[RunView]:
        """Every run, in the order of the settings, then of creation."""
        return [desks.overview.run() for desks in self._desks.values()]

    def run_view(self, run: str) -> RunView:
        """One run. Raises KeyError when there is none of this name."""
        return self._desks[run].overview.run()

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
        return self._desks[run].overview.steps(after, limit)

    def tokens_view(self) -> list[TokenRow]:
        """Every token that lets nodes in, the oldest first. Raises Refused while the ledger cannot be read."""
        return list_tokens(self._office.ledger)

    def broadcast_view(self, limit: int, run: str | None = None) -> BroadcastView:
        """Where each node of a run (None: of the first) is with its newest snapshot; at most `limit` nodes, those that
        lack it first. Raises KeyError when there is no such run."""
        return broadcast_view(self._office if run is None else self._desks[run].office, limit)

    def decisions_view(self) -> list[dict[str, Any]]:
        """Who was activated, released, and moved between runs; the newest first, with their numbers since the ledger
        was last loaded."""
        told = [desks.scheduler.told() for desks in self._desks.values()]
        if not self._placement.several:
            return told[0]
        every = [*self._placement.told(), *(made for each in told for made in each)]
        return sorted(every, key=lambda made: float(made["wall_seconds"]), reverse=True)[:DECISIONS_REMEMBERED]

    def appeals_view(self) -> list[AppealView]:
        """Open appeals first, then those that were answered. Raises Refused while the ledger cannot be read."""
        return self._first.appeals.view()

    @property
    def run_states(self) -> dict[str, str]:
        """The state of each run."""
        return {name: desks.office.run.state for name, desks in self._desks.items()}

    @property
    def any_run(self) -> str:
        """What a join string says that is for no particular run: the name of the only one, or that it is for any."""
        return next(iter(self._desks)) if len(self._desks) == 1 else ANY_RUN

    # changed by operators, each on record

    def resolve_appeal(
        self, id_: int, upheld: bool, *, actor: str, reason: str, amount_micros: int = 0, unit: Unit = "usd"
    ) -> AppealView:
        """Answer an appeal, for good. Raises KeyError or Refused; see `AppealDesk.resolve`."""
        return self._first.appeals.resolve(
            id_, upheld, actor=actor, reason=reason, amount_micros=amount_micros, unit=unit
        )

    def create_token(
        self, *, uses: int, expires_seconds: float | None, actor: str, reason: str, run: str | None = None
    ) -> str:
        """A token that lets `uses` new nodes in, into `run` alone unless that is None. Shown once: the ledger keeps its
        hash. Raises KeyError when there is no such run."""
        office = self._office if run is None else self._desks[run].office
        token = issue_token(
            office.ledger,
            uses=uses,
            expires_seconds=expires_seconds,
            wall=office.wall(),
            entropy=office.entropy,
            actor=actor,
            reason=reason,
            run=run,
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
        self._desks[run].life.change("paused", actor=actor, reason=reason)

    def resume_run(self, run: str, *, actor: str, reason: str) -> None:
        """Leases flow again. Raises KeyError or Refused."""
        self._desks[run].life.change("running", actor=actor, reason=reason)

    def stop_run(self, run: str, *, actor: str, reason: str) -> None:
        """End the run for good. Raises KeyError or Refused."""
        self._desks[run].life.change("stopped", actor=actor, reason=reason)

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
            for desks in self._desks.values():
                desks.leases.expire()
            self._note_silence()
            self._node_life.look()
            self._placement.look()
            for desks in self._desks.values():
                desks.tick()
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

    async def _loaded_again(self) -> tuple[House, NodeLife, Placement, dict[str, Scheduler]]:
        """What the ledger holds, as soon as it can be read. Until then every change is refused."""
        ledger = self._office.ledger
        while True:
            with suppress(LedgerUnavailable):
                ledger.probe()
                ledger.in_doubt = False
                try:
                    return self._opener.open(self._served)
                except LedgerUnavailable:
                    ledger.in_doubt = True
            await trio.sleep(TICK_SECONDS)

    def _known_node(self, peer: str) -> None:
        """Have it in memory. Raises KeyError for a key that was never let in."""
        if self._admission.find(peer) is None:
            raise KeyError(peer)

    def _change_node(
        self, peer: str, event: NodeEvent, actor: str, reason: str, expires_seconds: float | None = None
    ) -> None:
        self._known_node(peer)
        self._node_life.change(peer, event, actor=actor, reason=reason, expires_seconds=expires_seconds)


@asynccontextmanager
async def _given_tools(
    scorer: Scorer, task: Task | SandboxTask | None, text: ModelText | None, run: RunConfig
) -> AsyncIterator[RunTools]:
    """What the service was made with, where nobody opens others."""
    yield tools_of(run, scorer, task, text)
