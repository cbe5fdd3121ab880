"""The learner: `LearnerService._learn` is the learning plane of the paper's algorithm 1; the rest keeps it fed.

Beside it run: fetching admitted rollouts, reporting what became of them, publishing, serving chunks. Nothing is
reported as consumed before a checkpoint that covers it is durable, and nothing is published before its checkpoint is.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from typing import TYPE_CHECKING

import trio

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import COUNT_MAX, Ack, AdmittedReply, AdmittedRequest, LearnerReport

from .batch import fault
from .buffer import Buffer
from .consumed import ConsumedSet
from .interfaces import Batch, Progress
from .link import Backoff, CoordinatorLink
from .outbox import Outbox
from .publisher import Publisher
from .status import Gauges, LearnerStatus, step_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from echo2.p2p.broadcast import Broadcaster
    from echo2.p2p.identity import Identity
    from echo2.p2p.messages import PeerAddress, RunDescriptor, Standing
    from echo2.p2p.store import SnapshotStore
    from echo2.p2p.transport import Transport
    from echo2.p2p.transport_view import TransportView
    from echo2.tasks.model_card import ModelCard

    from .config import LearnerConfig
    from .interfaces import Trainer, TrainStats
    from .metrics_log import MetricsLog

FETCH_SECONDS = 20.0
"""How long the coordinator may hold a fetch. A pause or stop of the run is seen no later than this."""

FETCH_ROLLOUTS = 1024

FETCH_PAUSE_SECONDS = 0.2
"""After a reply without rollouts: a coordinator that answers at once must not be asked in a tight loop."""

STATUS_SECONDS = 1.0

TELL_SECONDS = 5.0
"""How soon the coordinator hears that this learner waits for something else than it did."""

ENDED = frozenset({"finished", "failed", "stopped"})
"""Run states in which nothing more is trained."""

log = logging.getLogger(__name__)


class LearnerService:
    """One run's learner. `show`, when given, is handed the status every second; `card` is checked against the run;
    `metrics` is told of every step."""

    def __init__(
        self,
        *,
        config: LearnerConfig,
        identity: Identity,
        transport: Transport,
        coordinator: PeerAddress,
        run: str,
        trainer: Trainer,
        store: SnapshotStore,
        broadcaster: Broadcaster,
        clock: Callable[[], float],
        wall: Callable[[], float],
        card: ModelCard | None = None,
        show: Callable[[LearnerStatus], None] | None = None,
        metrics: MetricsLog | None = None,
        network: Callable[[], TransportView] | None = None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._run = run
        self._trainer = trainer
        self._store = store
        self._broadcaster = broadcaster
        self._clock = clock
        self._card = card
        self._show = show
        self._wall = wall
        self._metrics = metrics
        self._network = network
        self._link = CoordinatorLink(transport, coordinator, run, name="learner")
        self._publisher = Publisher(
            identity=identity,
            run=run,
            domain=config.domain,
            trainer=trainer,
            store=store,
            link=self._link,
            wall=wall,
            adapters=config.adapter is not None,
        )
        self._state = "joining"
        self._run_state = "running"
        self._waiting_for = "the coordinator"
        self._epoch = 0
        self._version = 0
        self._steps = 0
        self._gauges = Gauges()
        self._drops_told: Counter[tuple[str, int]] = Counter()
        self._ledger_note = ""
        self._report_due = False
        self._told_waiting = ""
        self._known: Standing | None = None
        self._told_version = 0
        self._after = 0
        self._outbox = Outbox()
        self._buffer = Buffer(group_size=1, groups_per_step=1, staleness_max=0, outbox=self._outbox)  # until joined
        self._arrived = trio.lowlevel.ParkingLot()
        self._taken = trio.lowlevel.ParkingLot()
        self._decided = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Join, resume or begin, train to the end, then go on serving until cancelled.

        Raises ConfigurationError when the run is not this learner's or not for this model.
        """
        self._broadcaster.serve()
        async with trio.open_nursery() as nursery:
            if self._show is not None:
                nursery.start_soon(self._show_status, self._show)
            self._descriptor = await self._link.first_hello(self._check)
            await self._resume()
            self._link.greeted = self._greeted
            nursery.start_soon(self._fetch)
            nursery.start_soon(self._report)
            nursery.start_soon(self._tell_waiting)
            nursery.start_soon(self._publisher.run)
            await self._learn()

    async def _learn(self) -> None:
        """To the run's last step: wait for fresh enough rollouts, train; every kappa steps checkpoint and publish."""
        self._state = "training"
        while self._version < self._steps:
            batch, idle_seconds = await self._next_batch()
            if batch is None:
                break
            started = self._clock()
            stats = await self._trainer.train(batch)
            self._version += 1
            self._note(batch, stats, train_seconds=self._clock() - started, idle_seconds=idle_seconds)
            if self._version % self._descriptor.publish_period == 0 or self._version == self._steps:
                await self._checkpoint()
                self._publisher.offer(self._epoch, self._version)
        await self._end()

    async def _next_batch(self) -> tuple[Batch | None, float]:
        """R/n groups with v >= t - S, and the seconds idled for want of them; no batch when the operator ended the run.

        What is here is trained on during a pause too; waiting through one is the operator's wish and no idling.
        """
        idle_seconds = 0.0
        while self._run_state not in ENDED:
            now, paused = self._clock(), self._run_state == "paused"
            outcome = self._buffer.take(step=self._version, now=now, partial_seconds=self._config.partial_seconds)
            self._decided.unpark_all()
            self._taken.unpark_all()
            if isinstance(outcome, Batch):
                self._waiting_for = ""
                return outcome, idle_seconds
            self._waiting_for = f"the operator, who paused the run; {outcome}" if paused else str(outcome)
            with trio.move_on_after(math.inf if outcome.retry_at is None else max(0.0, outcome.retry_at - now)):
                await self._arrived.park()
            if not paused:
                idle_seconds += self._clock() - now
        return None, idle_seconds

    async def _checkpoint(self) -> None:
        """Weights, optimiser and progress, durable; only then may consumption be reported and the version published."""
        unreported = self._outbox.unreported()
        progress = Progress(
            run=self._run,
            epoch=self._epoch,
            version=self._version,
            consumed=self._buffer.consumed.runs(),
            finished=unreported.finished,
            steps=unreported.steps,
            recent=self._outbox.recent(),
        )
        backoff = Backoff()
        while True:
            try:
                if self._metrics is not None:
                    self._metrics.durable()
                await self._trainer.save(progress)
                break
            except OSError as error:
                self._waiting_for = f"the disk: the checkpoint cannot be written: {error}"
                log.warning("%s", self._waiting_for)
                if self._state == "restoring":  # the services that tell the coordinator are not up yet
                    with trio.move_on_after(TELL_SECONDS):
                        await self._report_once()
                await trio.sleep(backoff.next())
        self._waiting_for = ""
        self._outbox.durable_version = self._version
        self._decided.unpark_all()

    async def _end(self) -> None:
        """What is still held gets its terminal state; chunks are served on until the process is stopped."""
        stopped = self._version < self._steps
        if stopped and self._outbox.durable_version < self._version:
            await self._checkpoint()
        self._buffer.finish(step=self._version)
        self._decided.unpark_all()
        if not stopped:
            self._state = "publishing"
            await self._publisher.drained()
        self._state = "stopped" if stopped else "finished"
        self._waiting_for = ""
        log.info("the run is over: %s", self._state, extra={"version": self._version})

    # beginning and resuming

    def _check(self, descriptor: RunDescriptor) -> None:
        card = self._card
        if card is None:
            return
        if descriptor.tokenizer_sha256.hex() != card.tokenizer_sha256:
            raise ConfigurationError(
                f"the run {self._run} is for the model {descriptor.model}, whose tokenizer is not that of {card.name} "
                "in model_dir; use the folder the coordinator uses"
            )
        if descriptor.vocabulary_size != card.vocabulary_size:
            raise ConfigurationError(
                f"the run {self._run} has a vocabulary of {descriptor.vocabulary_size}, the model in model_dir one of "
                f"{card.vocabulary_size}; use the folder the coordinator uses"
            )

    async def _resume(self) -> None:
        """Begin at version 0, or go on from the newest checkpoint; either way under an epoch never used before.

        Never used as far as this home knows, and as far as the coordinator does: the home may be an old copy. The epoch
        is made durable before anything is published under it, so that no two manifests share an order. Before that the
        coordinator is told where the run goes on from; it refuses a learner that has lost what was published.
        """
        self._state = "restoring"
        self._known = self._link.standing
        progress = await self._trainer.restore()
        if progress is not None and progress.run != self._run:
            raise ConfigurationError(
                f"this home folder holds the run {progress.run!r}, not {self._run!r}; choose another home"
            )
        accepted = self._store.accepted(self._identity.peer_id, self._run)
        used = [entry for entry in (progress, accepted) if entry is not None]
        epochs = [entry.epoch for entry in used]
        standing = self._link.standing
        if standing is not None and standing.epoch is not None:
            epochs.append(standing.epoch)
        self._epoch = max(epochs) + 1 if epochs else 0
        if self._epoch > COUNT_MAX:
            raise ConfigurationError(
                f"epoch {max(epochs)} is in use, and there is none above it: the coordinator's ledger or this home "
                f"folder is damaged; put a backup back"
            )
        progress = progress or Progress(run=self._run, epoch=self._epoch, version=0)
        self._version = progress.version
        self._begin_metrics()
        self._steps = self._descriptor.steps
        self._outbox = Outbox(
            progress.finished, progress.steps, recent=progress.recent, durable_version=progress.version
        )
        self._buffer = Buffer(
            group_size=self._descriptor.group_size,
            groups_per_step=self._descriptor.rollouts_per_step // self._descriptor.group_size,
            staleness_max=self._descriptor.staleness_max,
            outbox=self._outbox,
            consumed=ConsumedSet(progress.consumed),
        )
        if standing is not None and self._version < (standing.published_version or 0):
            log.warning(
                "version %d was published, the newest checkpoint here is version %d: steps %d and above are undone",
                standing.published_version,
                self._version,
                self._version,
            )
        await self._report_once()
        await self._checkpoint()
        self._publisher.offer(self._epoch, self._version)
        log.info("at version %d, epoch %d", self._version, self._epoch)

    def _begin_metrics(self) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.begin(self._version)
        except OSError as error:
            raise ConfigurationError(f"the steps' numbers cannot be written: {error}") from error

    def _greeted(self) -> None:
        """Hello was said again. A coordinator that was started anew may have an older ledger than it had.

        So it is told of the newest snapshot again, asked for every rollout again, and sent a report; each of these
        changes nothing when it has forgotten nothing.
        """
        standing, known = self._link.standing, self._known
        if standing is None or (known is not None and known.incarnation == standing.incarnation):
            return
        self._known = standing
        published = self._publisher.published
        theirs = (
            (standing.published_epoch, standing.published_version)
            if standing.published_epoch is not None and standing.published_version is not None
            else (-1, -1)
        )
        behind = []
        if published is not None and theirs < published:
            has = "no snapshot" if theirs[0] < 0 else f"version {theirs[1]} of epoch {theirs[0]}"
            behind.append(f"it has {has}, version {published[1]} of epoch {published[0]} was published")
        if standing.learner_version < self._told_version:
            behind.append(f"it knows of {standing.learner_version} steps, {self._told_version} were reported")
        if standing.admitted_sequence < self._after:
            behind.append(f"it has admitted {standing.admitted_sequence} rollouts, {self._after} were fetched")
        if behind:
            self._ledger_note = f"the coordinator's ledger is older than it was ({'; '.join(behind)}): telling it again"
            log.warning("%s", self._ledger_note)
            self._outbox.measured_again()
        self._publisher.again()
        self._report_due = True
        self._decided.unpark_all()

    # what runs beside training

    async def _fetch(self) -> None:
        """Admitted rollouts into the buffer, for ever. Pacing keeps them few; the bound is for when it does not."""
        descriptor = self._descriptor
        held_max = (descriptor.staleness_max + 2) * descriptor.rollouts_per_step
        read_from = self._known
        while True:
            while len(self._buffer) >= held_max:
                await self._taken.park()
            if self._known is not read_from:  # another incarnation: from the first, whatever was settled with the old
                read_from, self._after = self._known, 0
                self._outbox.forget(self._outbox.settled())
            request = AdmittedRequest(
                run=self._run, after_sequence=self._after, rollouts_max=FETCH_ROLLOUTS, wait_seconds=FETCH_SECONDS
            )
            settled = self._outbox.settled()
            reply = await self._link.ask("admitted", request, AdmittedReply, wait_seconds=FETCH_SECONDS)
            for rollout in reply.rollouts:
                self._after = max(self._after, rollout.sequence)
                reason = fault(
                    rollout,
                    vocabulary_size=descriptor.vocabulary_size,
                    context_tokens=descriptor.context_tokens,
                )
                if reason is None:
                    self._buffer.add(rollout, step=self._version, now=self._clock())
                else:
                    self._buffer.refuse(rollout, step=self._version, reason=reason)
            for key in reply.withdraw:
                self._buffer.withdraw((key.lease_id, key.sample), step=self._version)
            self._outbox.forget(settled)
            if self._known is read_from:
                self._ledger_note = ""
            self._run_state = reply.run_state
            if self._run_state in ENDED:
                self._publisher.stop()
            self._arrived.unpark_all()
            self._decided.unpark_all()
            if not reply.rollouts:
                await trio.sleep(FETCH_PAUSE_SECONDS)

    async def _report(self) -> None:
        """What became of the rollouts, and each step's numbers, until the coordinator has acknowledged them."""
        while True:
            if not self._outbox.report() and not self._report_due:
                await self._decided.park()
                continue
            await self._report_once()

    async def _tell_waiting(self) -> None:
        """A report of nothing but the reason, when that is another; changing numbers alone are none."""
        while True:
            await trio.sleep(TELL_SECONDS)
            if _kind(self._waiting()) != self._told_waiting:
                self._report_due = True
                self._decided.unpark_all()

    async def _report_once(self) -> None:
        """One report, even when there is nothing to tell but where this learner is."""
        self._report_due = False
        self._told_waiting = _kind(self._waiting())
        report = self._outbox.report()
        consumed = self._buffer.consumed
        message = LearnerReport(
            run=self._run,
            epoch=self._epoch,
            version=self._version,
            finished=report.finished,
            steps=report.steps,
            status=(self._waiting() or self._state)[:512],
            consumed=consumed.count() - self._outbox.consumed_unreported(report),
            groups_before=consumed.unbroken(),
        )
        await self._link.ask("report", message, Ack)
        self._outbox.acknowledge(report)
        self._told_version = max(self._told_version, message.version)

    # what is shown

    def _note(self, batch: Batch, stats: TrainStats, *, train_seconds: float, idle_seconds: float) -> None:
        drops: Counter[tuple[str, int]] = Counter(self._buffer.drops)
        metrics = step_metrics(
            batch, stats, train_seconds=train_seconds, idle_seconds=idle_seconds, drops=drops - self._drops_told
        )
        self._drops_told = drops
        self._gauges.note(metrics, stats)
        self._outbox.measured(metrics)
        if self._metrics is not None:
            self._metrics.step(metrics, epoch=self._epoch, wall_seconds=self._wall())
        self._decided.unpark_all()
        log.info("step %d", batch.step, extra=metrics.model_dump(exclude={"culprits"}))
        for reason in stats.updates_skipped:
            log.warning("step %d: an update was left out: %s", batch.step, reason)
        for culprit in stats.culprits:
            log.warning(
                "step %d: lease %s, sample %d, of node %s: %s",
                batch.step,
                culprit.lease_id.hex(),
                culprit.sample,
                culprit.peer,
                culprit.reason,
            )

    def _waiting(self) -> str:
        return "; ".join(
            filter(None, [self._ledger_note, self._waiting_for, *self._link.trouble.values(), self._publisher.trouble])
        )[:2000]

    def status(self) -> LearnerStatus:
        """What this learner is doing, and what it waits for."""
        gauges, published = self._gauges, self._publisher.published
        return LearnerStatus(
            state=self._state,
            run=self._run,
            peer=self._identity.peer_id,
            epoch=self._epoch,
            version=self._version,
            steps=self._steps,
            published_version=published[1] if published else None,
            consumed=self._buffer.consumed.count(),
            held=len(self._buffer),
            unreported=len(self._outbox),
            dropped={f"{drop}, up to {tokens} tokens": count for (drop, tokens), count in self._buffer.drops.items()},
            reward=gauges.last.reward_mean if gauges.last else None,
            bubble=gauges.bubble,
            train_seconds=gauges.train_seconds,
            idle_seconds=gauges.idle_seconds,
            kl=gauges.last.kl_sampler_learner if gauges.last else None,
            kl_by_node=dict(gauges.kl_by_node),
            updates_skipped=dict(gauges.updates_skipped),
            waiting_for=self._waiting(),
            network=None if self._network is None else self._network(),
        )

    async def _show_status(self, show: Callable[[LearnerStatus], None]) -> None:
        while True:
            show(self.status())
            await trio.sleep(STATUS_SECONDS)


def _kind(reason: str) -> str:
    """A reason without its numbers."""
    return re.sub(r"[0-9]+", "#", reason)
