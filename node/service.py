"""The node: its services side by side, its owner's commands, and its end.

    Member     hello, heartbeats             -> what the pool's newest snapshot is
    Installer  fetch, load                   -> what is in use
    Worker     leases, batches               -> rollouts in the spool
    Delivery   submissions, receipts         <- the spool
    Paperwork  statements, appeals           <-> the papers

All of it runs under any trio clock: time, randomness, network, disk and engine are arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.channel import hold_against
from echo2.p2p.errors import ConfigurationError, ProtocolError

from .commands import MemoryCommands
from .delivery import Delivery
from .install import Installer
from .lifecycle import Commanded, Started, State, Stopped
from .membership import Member
from .papers import Papers
from .paperwork import Paperwork
from .situation import Situation
from .status import NodeStatus, installing, waiting_for
from .work import Worker

if TYPE_CHECKING:
    import random

    from echo2.p2p.identity import Identity
    from echo2.p2p.join import JoinString
    from echo2.p2p.nat import NatNode
    from echo2.p2p.store import SnapshotStore
    from echo2.p2p.transport import Transport
    from echo2.p2p.transport_view import TransportView
    from echo2.tasks.scorer import Scorer

    from .commands import Commands
    from .config import NodeSettings
    from .engine import Engine
    from .spool import Spool

log = logging.getLogger(__name__)

Show = Callable[[NodeStatus], None]
"""Told the status at least each `status_seconds`."""


class NodeService:
    """One node in one run. `run` returns when `finish` is done; raises ConfigurationError when it may not take part.

    `sandbox` plays the environments of multi-turn tasks; without it their leases are refused.
    """

    def __init__(
        self,
        *,
        config: NodeSettings,
        identity: Identity,
        transport: Transport,
        join: JoinString,
        engine: Engine,
        store: SnapshotStore,
        spool: Spool,
        papers: Papers | None = None,
        clock: Callable[[], float],
        rng: random.Random,
        commands: Commands | None = None,
        show: Show | None = None,
        network: Callable[[], TransportView] | None = None,
        nat: NatNode | None = None,
        sandbox: Scorer | None = None,
        home: bytes | None = None,
        software: str = "echo2",
    ) -> None:
        self._config = config
        self._identity = identity
        self._transport = transport
        self._join = join
        self._engine = engine
        self._commands = commands or MemoryCommands()
        self._show = show
        self._network = network
        self._nat = nat
        self.situation = situation = Situation(clock, spool.counts())
        self._broadcaster = Broadcaster(transport, store, join.peer, clock=clock, complain=self._complain)
        self._member = Member(
            situation,
            config=config,
            identity=identity,
            transport=transport,
            join=join,
            software=software,
            rng=rng,
            addresses=self._addresses,
            was_member=lambda: self._delivery.known,
            welcome=lambda run: self._delivery.welcomed(run),
            home=home,
            fetching=self._broadcaster.fetching,
        )
        self._worker = Worker(
            situation,
            config=config,
            transport=transport,
            join=join,
            engine=engine,
            spool=spool,
            member=self._member,
            rng=rng,
            sandbox=sandbox,
        )
        self._delivery = Delivery(
            situation, config=config, transport=transport, join=join, spool=spool, member=self._member, rng=rng
        )
        self._papers = papers or Papers(":memory:")
        self._paperwork = Paperwork(situation, config=config, transport=transport, join=join, papers=self._papers)
        self._installer = Installer(
            situation,
            transport=transport,
            join=join,
            store=store,
            broadcaster=self._broadcaster,
            engine=engine,
            worker=self._worker,
            member=self._member,
            rng=rng,
            snapshots_kept=config.snapshots_kept,
        )

    def knows(self, peer: str) -> bool:
        """Whether `peer` may keep a place here: the coordinator, and whoever came with a ticket of its."""
        return peer == self._join.peer or self._broadcaster.is_holder(peer)

    async def run(self) -> None:
        """Take part until the owner's `finish` is done. Raises ConfigurationError."""
        self._broadcaster.serve()
        self._obey()
        final: ConfigurationError | None = None
        try:
            async with trio.open_nursery() as nursery:
                for service in (
                    self._member.run,
                    self._member.beat,
                    self._installer.run,
                    self._worker.ask,
                    self._worker.generate,
                    self._delivery.submit,
                    self._delivery.collect,
                    self._paperwork.statements,
                    self._paperwork.appeals,
                    self._keep_status,
                    self._find_out_whether_reachable,
                ):
                    nursery.start_soon(service)
                self.situation.happened(Started())
                await self._finish()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            mistakes, others = group.split(ConfigurationError)
            if mistakes is None or others is not None:
                raise
            final = _first(mistakes)
            self.situation.failed("stopped", final)
        self.situation.happened(Stopped())
        self._publish_status()
        if final is not None:
            raise final

    async def goodbye(self) -> None:
        """After `run` has ended or was cancelled: the coordinator need not wait for us. Bounded, never raises."""
        self.situation.happened(Stopped())
        await self._member.goodbye()
        self._publish_status()

    # the owner's commands

    def _obey(self) -> None:
        self.situation.happened(Commanded(self._commands.read()))

    async def _finish(self) -> None:
        """Wait for `finish`, then end in order: the unit in hand, the spool, the receipts that are due soon."""
        situation = self.situation
        while True:
            await situation.until(lambda: situation.state is State.FINISHING)
            log.info("finishing: completing what is in hand")

            def taken_back() -> bool:
                return situation.state is not State.FINISHING

            await situation.until(lambda: self._worker.idle or taken_back())
            await situation.until(
                lambda: self._delivery.flushed or taken_back(), seconds=self._config.finish_flush_seconds
            )
            if self._delivery.flushed:
                await situation.until(
                    lambda: situation.counts.undecided == 0 or taken_back(),
                    seconds=self._config.finish_receipts_seconds,
                )
                await self._paperwork.last_statement()
            if not taken_back():
                break
        self._commands.write("run")  # done: the next start is not a finish
        log.info("finished; %d rollouts spooled for the next start", situation.counts.spooled)

    # who can dial us

    def _addresses(self) -> tuple[str, ...]:
        """What to announce: those that the coordinator has dialled; on a network without NAT all."""
        return self._transport.addresses if self._nat is None else self._nat.addresses

    async def _find_out_whether_reachable(self) -> None:
        nat, situation = self._nat, self.situation
        if nat is None:
            return
        await situation.joined()  # only admitted peers are dialled back
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nat.run, self._member.announce)
            while True:
                await situation.until(lambda: not situation.facts.joined)
                await situation.joined()
                nat.check_soon()  # a coordinator that was started anew has yet to find us

    # status

    @property
    def status(self) -> NodeStatus:
        """The state now."""
        situation, notice, snapshot = self.situation, self.situation.notice, self.situation.installed
        counts, traffic = situation.counts, self._broadcaster.traffic.values()
        download = installing(self._broadcaster.progress)
        error_at = situation.last_error_at
        return NodeStatus(
            peer=self._identity.peer_id,
            name=self._config.name,
            state=situation.state.value,
            command=situation.facts.command,
            waiting_for=waiting_for(situation, download=download, idle=self._worker.idle, line=self._commands.line),
            last_error=situation.last_error,
            last_error_seconds=None if error_at is None else situation.clock() - error_at,
            run=situation.membership.descriptor.run if situation.membership else self._join.run,
            run_state=notice.run_state if notice else "",
            node_state=notice.node_state if notice else "",
            node_reason=notice.node_reason if notice else "",
            node_expires_seconds=notice.node_expires_seconds if notice else None,
            warmup_returned=notice.warmup_returned if notice else 0,
            warmup_leases=notice.warmup_leases if notice else 0,
            warning=situation.warning,
            epoch=snapshot.manifest.epoch if snapshot else None,
            version=snapshot.manifest.version if snapshot else None,
            manifest_hash=snapshot.manifest_hash.hex() if snapshot else "",
            pool_version=notice.version if notice else None,
            installs=situation.installs,
            installing=download,
            leases_held=situation.leases_held,
            leases_expired=self._worker.expired,
            leases_refused=self._worker.refused,
            rollouts_generated=counts.generated,
            rollouts_submitted=counts.submitted,
            evaluations_submitted=counts.evaluations_submitted,
            spooled=counts.spooled,
            receipts=counts.receipts,
            receipts_waiting=counts.undecided,
            receipts_elsewhere=counts.receipts_elsewhere,
            price_hour=self._config.price_hour,
            tokens_per_second=situation.tokens_rate.per_second or 0.0,
            rollouts_per_second=situation.samples_rate.per_second or 0.0,
            received_bytes=sum(peer.received_bytes for peer in traffic),
            relayed_bytes=sum(peer.sent_bytes for peer in traffic),
            protocol_errors=situation.protocol_errors,
            engine_restarts=int(getattr(self._engine, "restarts", 0)),
            addresses=self._addresses(),
            network=None if self._network is None else self._network(),
            nat=None if self._nat is None else self._nat.view(),
        )

    async def _keep_status(self) -> None:
        while True:
            self._obey()
            self._publish_status()
            await trio.sleep(self._config.status_seconds)

    def _publish_status(self) -> None:
        if self._show is not None:
            self._show(self.status)

    def _complain(self, peer: str, error: ProtocolError) -> None:
        self.situation.protocol_errors += 1
        log.warning("%s broke the protocol: %s", peer, error)
        hold_against(self._transport, peer, error)


def _first(group: BaseExceptionGroup[ConfigurationError]) -> ConfigurationError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ConfigurationError)
    return error
