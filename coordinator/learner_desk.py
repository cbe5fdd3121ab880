"""The learner's three requests: admitted rollouts out, reports in, snapshots announced."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from echo2.p2p.errors import ProtocolError, Refused
from echo2.p2p.identity import open_signed, payload_hash
from echo2.p2p.manifest import check_manifest, is_below
from echo2.p2p.messages import Ack, AdmittedReply, AdmittedRollout, Detail, Manifest, PublishReply, RolloutKey

from .admission import train_sampling
from .history import insert, update
from .office import WAIT_SECONDS_MAX
from .prompts import Unopened
from .records import add_event, record, reported_steps, storable
from .run_book import ENDED, Published

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlalchemy as sa

    from echo2.p2p.messages import AdmittedRequest, LearnerReport, PublishRequest, Signed, StepMetrics

    from .broadcasts import BroadcastDesk
    from .history import Change
    from .leases import Kind
    from .office import Office
    from .records import RolloutEntry
    from .run_book import Changes

log = logging.getLogger(__name__)

REPLY_BYTES_MAX = 24 << 20
"""Content of one reply, below its frame bound with room for the fields around it."""

ROLLOUT_BYTES = 400
"""What an admitted rollout costs on the wire beside its arrays, rounded up."""

PROMPTS_OPENED = 4096
"""As `AdmittedReply` bounds the rollouts that need them."""

SPAN_BYTES, DETAIL_BYTES = 5, 100
"""Likewise one span, and one measure of an episode with its name."""

WITHDRAW_MAX = 4096
"""As `AdmittedReply` bounds it."""


CLOCK_SECONDS = 3600.0
"""What a learner's clock may be ahead of ours: more than clocks drift, less than a wrong time zone moves them."""

CLOCK_RETRY_SECONDS = 60.0
"""Until a person has set a clock; that of ours may be the wrong one."""


class LearnerDesk:
    """Answers the run's learner. `settled` is told after whatever may move the run's life on."""

    def __init__(self, office: Office, broadcasts: BroadcastDesk, settled: Callable[[], None]) -> None:
        self._office = office
        self._broadcasts = broadcasts
        self._settled = settled

    async def admitted(self, peer: str, request: AdmittedRequest) -> AdmittedReply:
        """Admitted rollouts behind `after_sequence`, waiting for the first. Raises Refused."""
        office = self._office
        office.known_learner(peer, request.run)
        run = office.run
        deadline = office.clock() + min(request.wait_seconds, WAIT_SECONDS_MAX)
        state = run.state
        while True:
            try:
                found = self._after(request.after_sequence, request.rollouts_max)
            except Unopened:
                await office.open_prompts(self._prompts_after(request.after_sequence))
                continue
            older = request.after_sequence >= run.next_sequence  # our ledger was put back: its numbers come again
            news = found or older or run.state != state or not all(run.withdraw.values())
            now = office.clock()
            if news or now >= deadline:
                break
            await office.admissions.wait(deadline - now)
        run.learner_seen_at = office.clock()
        withdraw = list(run.withdraw)[:WITHDRAW_MAX]
        for key in withdraw:
            run.withdraw[key] = True
        if found:
            run.delivered_sequence = max(run.delivered_sequence, found[-1].sequence)
        return AdmittedReply(
            run_state=run.state,
            rollouts=tuple(self._rollout(entry) for entry in found),
            withdraw=tuple(RolloutKey(lease_id=lease_id, sample=sample) for lease_id, sample in withdraw),
        )

    async def report(self, peer: str, report: LearnerReport) -> Ack:
        """What became of rollouts, and how steps went. Safe to repeat.

        Raises Refused; also, after it has taken what still counts of it, for a report of an epoch that is over: such a
        one is late on its way, and nobody waits for the answer, or there are two learners with one key.
        """
        office = self._office
        office.known_learner(peer, report.run)
        run = office.run
        # Each of these groups has a consumed rollout, so there are at most R a step, and all are listed below. The step
        # under way has taken its batch, and is not in the version yet.
        begun = min(report.version + 1, office.config.run.steps)
        if (report.groups_before or 0) > begun * office.config.run.R:
            raise Refused("bad_report", f"no {report.groups_before} groups fit into {begun} steps")
        current = report.epoch >= run.learner_epoch  # a report from before the learner's last restart says nothing new
        begins = report.epoch > run.epoch_known and run.state not in ENDED
        if begins:
            self._check_kept(report.epoch, report.version)
        changes = office.changes()
        decided: set[tuple[bytes, int]] = set()
        for finished in report.finished:
            key = finished.lease_id, finished.sample
            entry = run.unfinished.get(key)
            if not current and finished.step >= run.leases.learner_version:
                continue  # that step is undone
            if entry is not None and key not in decided:  # else it has its terminal state: the first one stands
                decided.add(key)
                changes.finish(entry, finished.state, finished.reason, step=finished.step)
        back = begins and run.lose(report.epoch, report.version)
        if back:
            self._drop_lost(report.version, changes, decided)
        for ordinal in run.leases.unwanted_groups(report.groups_before or 0):
            changes.close(ordinal, "consumed before this ledger knew of it")
        steps = [metrics for metrics in report.steps if current or metrics.step < run.leases.learner_version]
        with office.ledger.transaction() as connection:
            self._record_report(connection, report, changes, steps, current=current)
            if back:
                add_event(
                    connection,
                    wall=office.wall(),
                    actor=peer,
                    action="learner put back",
                    subject=f"epoch {report.epoch} version {report.version}",
                    reason=f"version {run.version} was published; steps {report.version} and above are undone",
                )
        changes.apply()
        fresh = [metrics for metrics in steps if metrics != run.steps.get(metrics.step)]
        office.measures.stepped(fresh, office.wall())
        for metrics in steps:
            run.steps[metrics.step] = metrics
        if steps:
            run.measure()
        if current:
            run.learner_epoch, run.learner_status = report.epoch, report.status
            run.learner_refused = ""
            run.leases.learner_at(report.version)
            if report.consumed is not None:
                run.leases.consumed = report.consumed
        if back:
            log.warning("the learner was put back to version %d; version %s is lost", report.version, run.version)
        office.work.ring()
        self._settled()
        if not current:
            raise self._superseded(run.learner_epoch)
        return Ack(count=len(report.finished))

    def _record_report(
        self,
        connection: sa.Connection,
        report: LearnerReport,
        changes: Changes,
        steps: list[StepMetrics],
        *,
        current: bool,
    ) -> None:
        name, wall = self._office.run.name, self._office.wall()
        found = reported_steps(connection, name, report.epoch, steps, wall=wall)
        if current:
            said = {"learner_epoch": report.epoch, "learner_version": report.version}
            found.append(update("runs", [name], said | {"learner_status": storable(report.status)}))
        learner = self._office.config.run.learner
        changes.record(connection, *found, wall=wall, actor=learner, action="report", subject=name, kind="flow")

    async def publish(self, peer: str, request: PublishRequest) -> PublishReply:
        """Record a new snapshot and plan its broadcast. Safe to repeat. Raises Refused or ProtocolError."""
        office = self._office
        run = office.run
        office.known_learner(peer, run.name)
        manifest = open_signed(request.manifest, peer, "manifest", Manifest)
        manifest_hash = payload_hash(request.manifest)
        known = run.manifests.get(manifest_hash)
        if known is None:
            self._check(manifest)
            base = self._base(manifest, request.base)
            known = Published(manifest, request.manifest, manifest_hash, office.clock())
            self._record(known, base)
            run.manifests[manifest_hash] = run.current = known
            if base is not None:
                run.manifests[base.manifest_hash] = base
            run.lose(*known.order)
            log.info("version %d published under epoch %d", manifest.version, manifest.epoch)
            self._settled()
            office.news.ring()
            office.work.ring()
        return PublishReply(plan=self._broadcasts.plan(known))

    def _check(self, manifest: Manifest) -> None:
        office = self._office
        try:
            check_manifest(manifest, publisher=office.config.run.learner, run=office.run.name)
        except ProtocolError as error:
            raise Refused("manifest", str(error)) from error
        self._check_clock(manifest)
        current = office.run.current
        if current is not None and manifest.epoch < current.order[0]:
            raise self._superseded(current.order[0])
        if current is not None and (manifest.epoch, manifest.version) <= current.order:
            raise Refused(
                "stale_manifest",
                f"epoch {manifest.epoch} version {manifest.version} is not above epoch {current.order[0]} "
                f"version {current.order[1]}, which is published",
            )
        self._check_kept(manifest.epoch, manifest.version)
        if manifest.version > office.config.run.steps:
            raise Refused("manifest", f"the run ends with version {office.config.run.steps}")
        if office.run.state in ENDED:
            raise Refused("run_over", f"the run is {office.run.state}")

    def _check_clock(self, manifest: Manifest) -> None:
        """Raise Refused for a manifest made in our future, or expired: no node would take it, now or for long.

        One made long ago is no fault: the learner has sent the same bytes since, while we were down or put back.
        """
        now = self._office.wall()
        ahead = manifest.created_seconds - now
        if ahead > CLOCK_SECONDS:
            fault = f"was made {ahead / 3600:.1f} h from now"
        elif manifest.expires_seconds <= now + CLOCK_SECONDS:
            fault = f"expires {(manifest.expires_seconds - now) / 3600:.1f} h from now"
        else:
            if ahead < -CLOCK_SECONDS:
                log.warning(
                    "version %d was made %.1f h ago by the learner's clock: it waited, or a clock is wrong",
                    manifest.version,
                    -ahead / 3600,
                )
            return
        moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M UTC")
        told = (
            f"by the coordinator's clock ({moment}) this snapshot's manifest {fault}: compare the clocks of both "
            "machines, set the wrong one, then start the learner again"
        )
        log.warning("version %d is refused: %s", manifest.version, told)
        raise Refused("clock", told, CLOCK_RETRY_SECONDS)

    def _superseded(self, epoch: int) -> Refused:
        log.warning("two processes use the learner's key: the later one goes on under epoch %d", epoch)
        return Refused(
            "learner_superseded",
            f"another learner process has gone on with this key under epoch {epoch}; stop one of the two",
        )

    def _base(self, manifest: Manifest, signed: Signed | None) -> Published | None:
        """An adapter's base, when this ledger has forgotten it. Raises Refused for one that no node could use."""
        run = self._office.run
        if manifest.base_hash is None:
            return None
        known, told = run.manifests.get(manifest.base_hash), None
        if known is None and signed is not None and payload_hash(signed) == manifest.base_hash:
            base = open_signed(signed, manifest.publisher, "manifest", Manifest)
            check_manifest(base, publisher=manifest.publisher, run=run.name)
            known = told = Published(base, signed, manifest.base_hash, None)
        if known is None or known.manifest.kind != "full" or not is_below(known.manifest, manifest):
            raise Refused("manifest", "an adapter on a snapshot that was not published whole before it in this run")
        return told

    def _check_kept(self, epoch: int, version: int) -> None:
        """Raise Refused when a learner would begin anew what it has lost altogether: that is for a person to decide."""
        run = self._office.run
        if version > 0 or not run.version or epoch <= run.epoch_known:
            return
        run.learner_refused = (
            "the learner has lost the run: it has no checkpoint and would begin at version 0, but version "
            f"{run.version} is published; put a checkpoint of this run back into its home, or begin another run"
        )
        log.warning("%s", run.learner_refused)
        raise Refused("checkpoint_lost", run.learner_refused)

    def _drop_lost(self, version: int, changes: Changes, decided: set[tuple[bytes, int]]) -> None:
        """Rollouts under versions that the learner has lost are of no use to it. It has asked for none yet."""
        for key, entry in self._office.run.unfinished.items():
            if entry.kind == "train" and entry.version > version and key not in decided:
                reason = f"lost version: the learner was put back to version {version}, this is of {entry.version}"
                changes.finish(entry, "stale", reason, step=version)

    def _record(self, published: Published, base: Published | None) -> None:
        office, manifest = self._office, published.manifest
        run = office.run
        begins = run.state == "ready"
        with office.ledger.transaction() as connection:
            changes: list[Change] = [
                insert(
                    "manifests",
                    {
                        "run": run.name,
                        "epoch": entry.manifest.epoch,
                        "version": entry.manifest.version,
                        "hash": entry.manifest_hash,
                        "published": office.wall(),
                        "broadcast_seconds": None,
                    },
                    {"payload": entry.signed.payload, "signature": entry.signed.signature},
                )
                for entry in filter(None, (base, published))
            ]
            if begins:
                changes.append(update("runs", [run.name], {"state": "running", "reason": ""}))
            record(
                connection,
                changes,
                wall=office.wall(),
                actor=manifest.publisher,
                action="published",
                subject=f"epoch {manifest.epoch} version {manifest.version}",
            )
        if begins:
            run.state = "running"

    def _after(self, sequence: int, rollouts_max: int) -> list[RolloutEntry]:
        """Admitted rollouts behind `sequence`, in order, within the bounds of one reply."""
        run = self._office.run
        if sequence >= run.next_sequence - 1:
            return []
        found: list[RolloutEntry] = []
        content_bytes = 0
        for number, entry in run.admitted.items():
            if number <= sequence or (entry.lease_id, entry.sample) in run.withdraw:
                continue
            prompt = self._office.prompts.tokens(entry.kind, entry.ordinal)
            content_bytes += len(entry.tokens) + len(entry.logprobs) + len(prompt) + ROLLOUT_BYTES
            content_bytes += SPAN_BYTES * len(entry.spans) + DETAIL_BYTES * len(entry.details or ())
            if len(found) >= rollouts_max or (found and content_bytes > REPLY_BYTES_MAX):
                break
            found.append(entry)
        return found

    def _prompts_after(self, sequence: int) -> list[tuple[Kind, int]]:
        """Whose prompts a reply may need: never as many as the prompt book keeps."""
        entries = [entry for number, entry in self._office.run.admitted.items() if number > sequence]
        return [(entry.kind, entry.ordinal) for entry in entries[:PROMPTS_OPENED]]

    def _rollout(self, entry: RolloutEntry) -> AdmittedRollout:
        assert entry.reward is not None, "an admitted rollout has its reward"
        return AdmittedRollout(
            sequence=entry.sequence,
            lease_id=entry.lease_id,
            ordinal=entry.ordinal,
            sample=entry.sample,
            peer=entry.peer,
            version=entry.version,
            prompt_tokens=self._office.prompts.tokens(entry.kind, entry.ordinal),
            tokens=entry.tokens,
            logprobs=entry.logprobs,
            finish=entry.finish,
            temperature=train_sampling(self._office).temperature,
            reward=entry.reward,
            spans=entry.spans,
            details=tuple(Detail(name=name, value=value) for name, value in (entry.details or {}).items()),
        )
