"""Who generates what next: grants, pacing, expiry, reissue, the evaluation gate and the run's budget. Pure.

Rules (DESIGN section 7). `reserved` = consumed + queued (held or admitted) + outstanding + open again; x is the version
the asker has installed; v the learner's; depth = `capacity.pacing_depth`.

| what                | rule                                                                                          |
|---------------------|-----------------------------------------------------------------------------------------------|
| fresh slots         | only while reserved < min((x + depth + 1) R, steps R); oldest ordinal first                   |
| share               | at most 1 / nodes of what may be leased now, but a group: all end close together              |
| reissues            | before any fresh slot; never blocked: their place is already in `reserved`                    |
| too old             | no train lease under x < v - S; one that is out under such an x expires at once               |
| lost snapshot       | the learner was put back below it: its leases expire at once, what comes for them is late     |
| expiry              | at its duration, or when its node is dead or restarted: its slots are open again              |
| late slice          | accepted like any other while its slot is still wanted: first to arrive wins                  |
| duplicate           | the slot was already filled by another lease                                                  |
| closed group        | the learner consumed one of its rollouts, or dropped one as of no use: arrivals are late      |
| withdrawn rollout   | its slot is open again; so is that of one dropped for its staleness alone (it would starve    |
|                     | slow prompts to give up their groups)                                                         |
| evaluation gate     | while the baseline or final one is open only its slots are leased, and only under its version |
| interim evaluation  | beside training, only under its version: what training leaves idle, and else at most its      |
|                     | share of all that is granted; see `_interim`                                                  |
| end                 | once version `steps` is published no train lease is granted                                   |

So `reserved` rises only by a fresh grant, which is what keeps both the bound and the promise that every group begun can
be completed: no deadlock. A lease is proposed, made durable, and only then recorded here.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from echo2.p2p.messages import SLICES_MAX

from .slots import SlotState, SlotTable, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Kind = Literal["train", "eval"]
Outcome = Literal["accept", "duplicate", "late"]
Purpose = Literal["baseline", "interim", "final"]


class LeaseState(Enum):
    """OUT with a node; EXPIRED: its slots are anyone's, its slice still welcome; RETURNED: its slice is durable."""

    OUT = "out"
    EXPIRED = "expired"
    RETURNED = "returned"


@dataclass(slots=True)
class LeaseEntry:
    """One lease as it was sent. Times are the coordinator's monotonic seconds."""

    lease_id: bytes
    peer: str
    kind: Kind
    span: Span
    version: int
    manifest_hash: bytes
    tokens_max: int
    granted_at: float
    expires_at: float
    state: LeaseState = LeaseState.OUT
    account: int | None = None
    """What its node is paid from; None for a volunteer's."""


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """The numbers of the run that decide what may be leased."""

    group_size: int
    rollouts_per_step: int
    steps: int
    staleness_max: int
    slice_samples: int


@dataclass(slots=True)
class Evaluation:
    """Held-out prompts under one version, `table.group_size` samples each; ordinal = held-out index.

    `share` is of all samples granted, what an interim one may take from training; `credit` what it has of that.
    """

    version: int
    purpose: Purpose
    table: SlotTable
    share: float = 1.0
    credit: float = 0.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to lease, or why nothing."""

    kind: Kind
    spans: tuple[Span, ...]
    reason: str = ""


class LeaseBook:
    """The leases of one run. Rebuilt from the ledger by `restore` after a restart."""

    def __init__(self, rules: LeaseRules) -> None:
        self.rules = rules
        self.train = SlotTable(rules.group_size)
        self.evaluation: Evaluation | None = None
        """The baseline or the final one: training waits for it."""
        self.interim: Evaluation | None = None
        """One beside training."""
        self.leases: dict[bytes, LeaseEntry] = {}
        self.consumed = 0
        """By steps that stand. A learner that was put back undid some: what those consumed stays consumed, but the run
        needs as many rollouts again."""
        self.lost: set[bytes] = set()
        """Manifest hashes of lost snapshots."""
        self.queued = 0
        """Train rollouts held or admitted."""
        self.learner_version = 0
        self._held_by: dict[str, set[bytes]] = {}
        self._group_leases: dict[int, list[bytes]] = {}
        self._deadlines: list[tuple[float, bytes]] = []

    @property
    def reserved(self) -> int:
        """What pacing counts."""
        return self.consumed + self.queued + self.train.leased + self.train.open

    def reserved_max(self, version: int, depth: int) -> int:
        """The pacing bound under `version`, within the run's budget."""
        rules = self.rules
        return min(version + depth + 1, rules.steps) * rules.rollouts_per_step

    def held_by(self, peer: str) -> tuple[LeaseEntry, ...]:
        """Leases that are out with `peer`."""
        return tuple(self.leases[lease_id] for lease_id in self._held_by.get(peer, ()))

    # deciding

    def propose(
        self,
        *,
        peer: str,
        version: int,
        newest: int,
        samples_max: int,
        depth: int,
        nodes: int = 1,
        slices_max: int = SLICES_MAX,
    ) -> Proposal:
        """What `peer`, which has `version` installed, may be given now, one of `nodes` that could take it.

        `newest` is the newest published version.
        """
        evaluation = self.evaluation
        if evaluation is not None:
            if version != evaluation.version:
                return Proposal("eval", (), f"the {evaluation.purpose} evaluation needs version {evaluation.version}")
            spans = self._heldout(evaluation, peer, samples_max, nodes, slices_max)
            return Proposal("eval", tuple(spans), "" if spans else "every held-out prompt is out or answered")
        rules = self.rules
        if max(newest, self.learner_version) >= rules.steps:
            return Proposal("train", (), f"all {rules.steps} steps are trained")
        if version < self.learner_version - rules.staleness_max:
            return Proposal(
                "train",
                (),
                f"version {version} is too old for step {self.learner_version} at S = {rules.staleness_max}",
            )
        interim = self.interim if self.interim is not None and self.interim.version == version else None
        if interim is not None and interim.credit >= min(self.rules.slice_samples, interim.table.group_size):
            spans = self._heldout(interim, peer, min(samples_max, int(interim.credit)), nodes, slices_max)
            if spans:
                return Proposal("eval", tuple(spans))
        fresh = max(0, self.reserved_max(version, depth) - self.reserved)
        spans = self.train.choose(
            samples_max=self._share(self.train.open + fresh, samples_max, nodes),
            span_samples=rules.slice_samples,
            spans_max=slices_max,
            fresh_max=fresh,
            peer=peer,
        )
        if not spans and interim is not None:
            idle = self._heldout(interim, peer, samples_max, nodes, slices_max)
            if idle:
                return Proposal("eval", tuple(idle))
        return Proposal("train", tuple(spans), "" if spans else self.pacing_reason(version, depth))

    def _heldout(self, evaluation: Evaluation, peer: str, samples_max: int, nodes: int, slices_max: int) -> list[Span]:
        """Slots of an evaluation, in the order of its prompts."""
        table = evaluation.table
        share = self._share(table.open + table.fresh, samples_max, nodes)
        span_samples = min(self.rules.slice_samples, table.group_size)
        return table.choose(
            samples_max=share, span_samples=span_samples, spans_max=slices_max, fresh_max=share, peer=peer
        )

    def _share(self, left: int, samples_max: int, nodes: int) -> int:
        """Guided self-scheduling: what is left, divided by those who could take it; never less than a group."""
        return min(samples_max, max(self.rules.group_size, -(-left // max(nodes, 1))))

    def pacing_reason(self, version: int, depth: int) -> str:
        """Why no fresh slot is leased under `version`."""
        bound = self.reserved_max(version, depth)
        if self.reserved >= bound == self.rules.steps * self.rules.rollouts_per_step:
            return f"the run needs no more than {bound} rollouts"
        return f"pacing: {self.reserved} of {bound} under version {version}"

    def judge(self, lease: LeaseEntry) -> dict[int, Outcome]:
        """What becomes of each sample of a slice that arrives for `lease` now, its content aside."""
        return {sample: self._judge(lease, sample) for sample in lease.span.samples}

    def _judge(self, lease: LeaseEntry, sample: int) -> Outcome:
        table = self._table(lease)
        slot = table.slot(lease.span.ordinal, sample) if table is not None else None
        if slot is None:
            return "late"
        if slot.state is SlotState.FILLED:
            return "duplicate"
        if (
            slot.state is SlotState.ABANDONED
            or lease.manifest_hash in self.lost
            or (lease.kind == "train" and self._too_old(lease.version))
        ):
            return "late"
        return "accept"

    # recording what is durable

    def grant(self, leases: Iterable[LeaseEntry]) -> None:
        """These leases are durable and about to be sent."""
        for lease in leases:
            table = self._table(lease)
            assert table is not None, "a lease is granted for an open kind"
            table.lease(lease.span, lease.lease_id)
            self._remember(lease)
            self._charge(lease)

    def take_back(self, leases: Iterable[LeaseEntry]) -> None:
        """They were granted and could not be made durable: nobody was told, and their slots are open again."""
        for lease in leases:
            table = self._table(lease)
            if table is not None:
                table.take_back(lease.span, lease.lease_id)
            self._leave(lease, LeaseState.EXPIRED)
            self.leases.pop(lease.lease_id, None)

    def _charge(self, lease: LeaseEntry) -> None:
        """An interim evaluation earns by what training is granted, and pays for what it is; idle time is free."""
        interim = self.interim
        if interim is None:
            return
        if lease.kind == "train":
            interim.credit += lease.span.count * interim.share / (1 - interim.share)
        else:
            interim.credit = max(0.0, interim.credit - lease.span.count)

    def deliver(self, lease: LeaseEntry, accepted: Iterable[int]) -> None:
        """The slice of `lease` is durable, its `accepted` samples as held rollouts."""
        table = self._table(lease)
        for sample in accepted:
            if lease.kind == "train":
                self.queued += 1
            if table is not None:
                table.fill(lease.span.ordinal, sample, lease.lease_id)
        if table is not None:
            table.release(lease.span, lease.lease_id, lease.peer, failed=False)
        self._leave(lease, LeaseState.RETURNED)

    def reject(self, lease: LeaseEntry) -> None:
        """The slice's content was refused, durably: its slots are open again, for others first."""
        table = self._table(lease)
        if table is not None:
            table.release(lease.span, lease.lease_id, lease.peer, failed=True)
        self._leave(lease, LeaseState.RETURNED)

    def wanted_again(self, *, state: str, version: int, step: int) -> bool:
        """Whether a slot whose rollout ended so is open again: it was withdrawn, or rejected by its replay, or too old
        (or of a lost version) for the step that dropped it. Else its group is closed: the learner consumed it or can do
        nothing more with it."""
        if state == "stale":
            return version > step or step - version > self.rules.staleness_max
        return state in {"withdrawn", "rejected"}

    def finish(self, *, ordinal: int, sample: int, lease_id: bytes, consumed: bool, reopen: bool) -> None:
        """A queued train rollout reached its terminal state."""
        self.queued -= 1
        self.consumed += consumed
        if reopen:
            self.train.reopen(ordinal, sample, lease_id)
        else:
            self.close_group(ordinal)

    def reopen_evaluation(self, version: int, ordinal: int, sample: int, lease_id: bytes) -> None:
        """An evaluation's rollout was withdrawn before it was scored, or rejected by its replay."""
        evaluation = self.evaluation_of(version)
        if evaluation is not None:
            evaluation.table.reopen(ordinal, sample, lease_id)

    def evaluation_of(self, version: int) -> Evaluation | None:
        """The open evaluation of this version."""
        open_ones = (self.evaluation, self.interim)
        return next((one for one in open_ones if one is not None and one.version == version), None)

    def evaluation_is_out(self, version: int) -> bool:
        """Whether some node still holds a lease of this version's evaluation."""
        return any(
            lease.kind == "eval" and lease.version == version and lease.state is LeaseState.OUT
            for lease in self.leases.values()
        )

    def close_group(self, ordinal: int) -> bool:
        """Nothing more of this train group is wanted. False when it was closed already."""
        if self.train.is_closed(ordinal):
            return False
        self.train.close(ordinal)
        for lease_id in self._group_leases.pop(ordinal, ()):
            lease = self.leases.get(lease_id)
            if lease is not None and lease.state is not LeaseState.OUT:
                del self.leases[lease_id]
        return True

    def open_evaluation(
        self, version: int, purpose: Purpose, prompts: int, samples: int = 1, share: float = 1.0
    ) -> None:
        """Held-out prompts are leased under `version`: only they, or for an interim one beside training."""
        evaluation = Evaluation(version, purpose, SlotTable(samples, prompts), share)
        if purpose == "interim":
            self.interim = evaluation
        else:
            self.evaluation = evaluation

    def close_evaluation(self, version: int) -> None:
        """The evaluation of this version needs nothing more."""
        if self.evaluation is not None and self.evaluation.version == version:
            self.evaluation = None
        if self.interim is not None and self.interim.version == version:
            self.interim = None
        for lease_id in [
            lease_id
            for lease_id, lease in self.leases.items()
            if lease.kind == "eval" and lease.version == version and lease.state is not LeaseState.OUT
        ]:
            del self.leases[lease_id]

    def learner_at(self, version: int) -> None:
        """The learner has finished `version` steps: leases under versions too old for it expire now."""
        self.learner_version = version
        for lease in self.leases.values():
            if lease.state is LeaseState.OUT and lease.kind == "train" and self._too_old(lease.version):
                heapq.heappush(self._deadlines, (float("-inf"), lease.lease_id))

    def lose(self, manifest_hashes: Iterable[bytes]) -> None:
        """The learner was put back below these snapshots: leases under them expire now."""
        self.lost.update(manifest_hashes)
        for lease in self.leases.values():
            if lease.state is LeaseState.OUT and lease.manifest_hash in self.lost:
                heapq.heappush(self._deadlines, (float("-inf"), lease.lease_id))

    def unwanted_groups(self, below: int) -> list[int]:
        """Groups below this ordinal that are open or were never begun, in order."""
        begun = [ordinal for ordinal in self.train.groups if ordinal < below]
        return sorted({*begun, *range(self.train.next_ordinal, below)})

    def expire(self, now: float) -> list[LeaseEntry]:
        """Reopen the slots of every lease whose time is over; returns those leases."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.leases.get(lease_id)
            if lease is not None and lease.state is LeaseState.OUT:
                self._expire(lease)
                expired.append(lease)
        return expired

    def next_expiry(self) -> float | None:
        """When `expire` is next needed."""
        return self._deadlines[0][0] if self._deadlines else None

    def release_peer(self, peer: str, granted_before: float = float("inf")) -> list[LeaseEntry]:
        """Expire what `peer` was granted before then: it is dead, suspended, or started anew."""
        released = [lease for lease in self.held_by(peer) if lease.granted_at < granted_before]
        for lease in released:
            self._expire(lease)
        return released

    # rebuilding

    def restore(
        self,
        leases: Iterable[tuple[LeaseEntry, Mapping[int, bool] | None]],
        closed: Iterable[int],
        next_slot: tuple[int, int],
    ) -> None:
        """Take over the ledger's leases of open groups (and of the open evaluation), in the order they were granted.

        With each: None when its slice never came, else which samples still fill their slot. `next_slot` is behind the
        last slot ever leased. Counts and the learner's version are set by the caller.
        """
        filled: list[tuple[SlotTable, LeaseEntry, int]] = []
        for lease, returned in leases:
            table = self._table(lease)
            if table is None:
                continue
            table.lease(lease.span, lease.lease_id)
            self._remember(lease)
            if returned is not None:
                filled += [(table, lease, sample) for sample, live in returned.items() if live]
                table.release(lease.span, lease.lease_id, lease.peer, failed=False)
                self._leave(lease, LeaseState.RETURNED)
        for table, lease, sample in filled:
            table.fill(lease.span.ordinal, sample, lease.lease_id)
        table = self.train
        ordinal, sample = next_slot
        table.next_ordinal, table.next_sample = (ordinal + 1, 0) if sample >= table.group_size else (ordinal, sample)
        for ordinal in sorted(closed):
            table.close(ordinal)

    # helpers

    def _table(self, lease: LeaseEntry) -> SlotTable | None:
        if lease.kind == "train":
            return self.train
        evaluation = self.evaluation_of(lease.version)
        return evaluation.table if evaluation is not None else None

    def _too_old(self, version: int) -> bool:
        return version < self.learner_version - self.rules.staleness_max

    def _remember(self, lease: LeaseEntry) -> None:
        self.leases[lease.lease_id] = lease
        self._held_by.setdefault(lease.peer, set()).add(lease.lease_id)
        heapq.heappush(self._deadlines, (lease.expires_at, lease.lease_id))
        if lease.kind == "train":
            self._group_leases.setdefault(lease.span.ordinal, []).append(lease.lease_id)

    def _expire(self, lease: LeaseEntry) -> None:
        table = self._table(lease)
        if table is not None:
            table.release(lease.span, lease.lease_id, lease.peer, failed=False)
        self._leave(lease, LeaseState.EXPIRED)

    def _leave(self, lease: LeaseEntry, state: LeaseState) -> None:
        lease.state = state
        held = self._held_by.get(lease.peer)
        if held is not None:
            held.discard(lease.lease_id)
            if not held:
                del self._held_by[lease.peer]
        if lease.kind == "train" and self.train.is_closed(lease.span.ordinal):
            self.leases.pop(lease.lease_id, None)
