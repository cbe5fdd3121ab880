"""One run in memory, and how a request changes it: decided, made durable in one transaction, then applied here."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from . import capacity, records
from .counters import Numbers
from .leases import LeaseBook, Purpose
from .records import RolloutEntry, RolloutState, Verdict

if TYPE_CHECKING:
    import sqlalchemy as sa

    from echo2.p2p.messages import Manifest, Signed, StepMetrics

    from .history import Change
    from .payroll import Settlement
    from .pool import Pool, Tally
    from .records import Details, EventKind

RunLifeState = Literal["ready", "running", "paused", "stopped", "finished"]

ENDED = frozenset({"stopped", "finished"})

TERMINAL = frozenset({"consumed", "stale", "withdrawn", "rejected", "duplicate", "evaluated"})


@dataclass(slots=True)
class Published:
    """A published snapshot. `published_at` is None for one published before this coordinator started."""

    manifest: Manifest
    signed: Signed
    manifest_hash: bytes
    published_at: float | None
    broadcast_seconds: float | None = None
    plan: Signed | None = None
    plan_kind: str = ""
    """Of the last plan made, for people."""
    roster: frozenset[str] = frozenset()

    @property
    def order(self) -> tuple[int, int]:
        """Manifests of one run and key are ordered by this."""
        return self.manifest.epoch, self.manifest.version


@dataclass(slots=True)
class EvaluationProgress:
    """An evaluation under way or over: `size` answers are wanted, `samples` of each prompt, `count` are scored."""

    version: int
    purpose: Purpose
    size: int
    count: int = 0
    total: float = 0.0
    samples: int = 1
    ended: bool = False
    reason: str = ""
    """Why it ended before it was complete."""
    detail_totals: dict[str, float] = field(default_factory=dict)
    """Sums of what its episodes measured beside the reward."""

    def add(self, details: Details | None) -> None:
        """One more episode's measures."""
        for name, value in (details or {}).items():
            self.detail_totals[name] = self.detail_totals.get(name, 0.0) + value

    @property
    def complete(self) -> bool:
        """Every prompt that can be answered was, `samples` times."""
        return self.ended and not self.reason

    @property
    def mean(self) -> float | None:
        """Mean reward so far: avg@k with k = `samples`."""
        return self.total / self.count if self.count else None

    @property
    def details(self) -> dict[str, float]:
        """Means of the episodes' other measures so far."""
        return {name: total / self.count for name, total in self.detail_totals.items()} if self.count else {}


@dataclass(slots=True)
class RunBook:
    """Everything about a run that requests need, without reading the ledger."""

    name: str
    leases: LeaseBook
    numbers: Numbers = field(default_factory=Numbers)
    """Shared with the other runs of the ledger."""
    state: RunLifeState = "ready"
    reason: str = ""
    learner_epoch: int = 0
    learner_status: str = ""
    learner_seen_at: float | None = None
    learner_addresses: tuple[str, ...] = ()
    learner_refused: str = ""
    """Why the learner was turned away, until one is accepted: nothing is leased that nobody would train on."""
    manifests: dict[bytes, Published] = field(default_factory=dict)
    current: Published | None = None
    evaluations: dict[int, EvaluationProgress] = field(default_factory=dict)
    steps: dict[int, StepMetrics] = field(default_factory=dict)
    held: deque[RolloutEntry] = field(default_factory=deque)
    """Waiting for their reward, in order of arrival."""
    admitted: dict[int, RolloutEntry] = field(default_factory=dict)
    """By admitted sequence, which is also their order."""
    unfinished: dict[tuple[bytes, int], RolloutEntry] = field(default_factory=dict)
    """Held and admitted, by (lease id, sample)."""
    withdraw: dict[tuple[bytes, int], bool] = field(default_factory=dict)
    """To be withdrawn by the learner, and whether it has been told."""
    delivered_sequence: int = 0
    """The highest admitted sequence the learner may have seen."""
    receipts: Counter[str] = field(default_factory=Counter)
    """Of each node's receipts in this run, the last one's sequence."""
    next_sequence: int = 1
    t_train: float | None = None
    """Median of recent steps, in seconds. Kept, not computed: every lease request asks."""
    t_bcast: float | None = None

    @property
    def version(self) -> int | None:
        """The newest published version."""
        return self.current.manifest.version if self.current is not None else None

    @property
    def epoch_known(self) -> int:
        """The highest epoch ever seen."""
        return max(self.learner_epoch, self.current.order[0] if self.current is not None else 0)

    @property
    def lost(self) -> bool:
        """Whether the newest published snapshot is one that the learner has lost."""
        return self.current is not None and self.current.manifest_hash in self.leases.lost

    def forget_plans(self) -> None:
        """Addresses or the roster are others: whoever asks next for the newest snapshot or its base gets a new plan."""
        for published in self.manifests.values():
            published.plan = None

    def lose(self, epoch: int, version: int) -> bool:
        """From `epoch` on the learner went on from `version`: what earlier epochs published above it is lost.

        Returns whether anything is.
        """
        gone = {
            manifest_hash
            for manifest_hash, published in self.manifests.items()
            if published.manifest.epoch < epoch and published.manifest.version > version
        }
        self.leases.lose(gone)
        return bool(gone)

    def was_delivered(self, entry: RolloutEntry) -> bool:
        """Whether the learner may hold this rollout, and so alone can say what becomes of it."""
        return entry.state == "admitted" and entry.sequence <= self.delivered_sequence

    def measure(self) -> None:
        """Recompute the medians, after a step was reported or a broadcast ended."""
        recent = sorted(self.steps)[-capacity.ESTIMATE_STEPS :]
        self.t_train = capacity.recent_median([self.steps[step].train_seconds for step in recent])
        done = sorted(
            (p.order, p.broadcast_seconds) for p in self.manifests.values() if p.broadcast_seconds is not None
        )
        self.t_bcast = capacity.recent_median([seconds for _, seconds in done])


class Changes:
    """What one request does to rollouts and groups, and so to what is owed. `record` or `write` inside the transaction,
    `apply` after it."""

    def __init__(self, run: RunBook, pool: Pool, tally: Tally, pay: Settlement) -> None:
        self._run = run
        self.pay = pay
        self._pool = pool
        self._tally = tally
        self._receipts: Counter[str] = Counter()
        self._ids = run.numbers.rollout_id
        self.arrivals: list[Verdict] = []
        self.changed: list[Verdict] = []
        self.closing: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self.arrivals or self.changed or self.closing)

    def arrive(self, entry: RolloutEntry, state: RolloutState, reason: str = "") -> None:
        """A rollout that was not known before; its id is given here. Terminal ones keep no content."""
        entry.id = self._ids
        self._ids += 1
        if state in TERMINAL:
            entry.tokens = entry.logprobs = b""
        self.arrivals.append(Verdict(entry, state, reason, self._receipt(entry, state)))
        self.pay.arrive(entry, state, terminal=state in TERMINAL)

    def admit(
        self, entry: RolloutEntry, reward: float, reason: str, sequence: int, details: Details | None = None
    ) -> None:
        """A held train rollout has its reward."""
        self.changed.append(Verdict(entry, "admitted", reason, reward=reward, sequence=sequence, details=details))

    def finish(
        self,
        entry: RolloutEntry,
        state: RolloutState,
        reason: str,
        *,
        step: int | None = None,
        reward: float | None = None,
        details: Details | None = None,
        suspended: bool = False,
    ) -> None:
        """A held or admitted rollout reaches its terminal state. `suspended`: its node is being suspended with this."""
        receipt = self._receipt(entry, state)
        asked_back = (entry.lease_id, entry.sample) in self._run.withdraw
        suspended = suspended or asked_back or self._pool.nodes[entry.peer].state == "suspended"
        self.pay.finish(entry, state, suspended=suspended)
        self.changed.append(Verdict(entry, state, reason, receipt, reward=reward, step=step, details=details))
        if entry.kind == "train" and not self._reopens(self.changed[-1]):
            self.close(entry.ordinal, state)

    def close(self, ordinal: int, reason: str) -> None:
        """A group needs nothing more."""
        if not self._run.leases.train.is_closed(ordinal):
            self.closing.setdefault(ordinal, reason)

    def _listed(self, wall: float) -> list[Change]:
        name = self._run.name
        found: list[Change] = []
        if self.arrivals:
            found += records.arrived_rollouts(name, self.arrivals, wall=wall)
        if self.changed:
            found.append(records.changed_rollouts(self.changed))
        if self.closing:
            found.append(records.closed_groups(name, self.closing))
        return found + self.pay.changes(wall)

    def record(
        self,
        connection: sa.Connection,
        *more: Change,
        wall: float,
        actor: str,
        action: str,
        subject: str = "",
        reason: str = "",
        kind: EventKind = "audit",
    ) -> None:
        """Record everything, `more` with it, and post what is due for it. Nothing of the daily flow that is empty."""
        found = [*self._listed(wall), *more]
        if found or kind == "audit":
            records.record(
                connection, found, wall=wall, actor=actor, action=action, subject=subject, reason=reason, kind=kind
            )
        self.pay.post(connection, wall)

    def write(self, connection: sa.Connection, *, wall: float, actor: str, action: str) -> None:
        """Record everything, as part of the daily flow."""
        self.record(connection, wall=wall, actor=actor, action=action, subject=self._run.name, kind="flow")

    def apply(self) -> None:
        """It is durable: memory follows. (What a lease's slice means for its slots, the intake desk applies itself.)"""
        run = self._run
        self.pay.apply()
        run.numbers.rollout_id = max(run.numbers.rollout_id, self._ids)
        run.receipts.update(self._receipts)
        for verdict in self.arrivals:
            entry = verdict.entry
            self._enter(verdict, None)
            if entry.state == "held":
                run.held.append(entry)
                run.unfinished[entry.lease_id, entry.sample] = entry
        for verdict in self.changed:
            self._change(verdict)
        for ordinal in self.closing:
            run.leases.close_group(ordinal)

    def _change(self, verdict: Verdict) -> None:
        run, entry, old = self._run, verdict.entry, verdict.entry.state
        if verdict.reward is not None:
            entry.reward = verdict.reward
        if verdict.details is not None:
            entry.details = verdict.details
        self._enter(verdict, old)
        if verdict.state == "admitted":
            assert verdict.sequence is not None, "an admitted rollout has its place"
            entry.sequence = verdict.sequence
            run.admitted[entry.sequence] = entry
            run.next_sequence = max(run.next_sequence, entry.sequence + 1)
            return
        key = entry.lease_id, entry.sample
        run.unfinished.pop(key, None)
        run.withdraw.pop(key, None)
        run.admitted.pop(entry.sequence, None)
        if entry.kind == "train":
            run.leases.finish(
                ordinal=entry.ordinal,
                sample=entry.sample,
                lease_id=entry.lease_id,
                consumed=verdict.state == "consumed",
                reopen=self._reopens(verdict),
            )
        elif verdict.state in {"withdrawn", "rejected"}:
            run.leases.reopen_evaluation(entry.version, entry.ordinal, entry.sample, entry.lease_id)

    def _enter(self, verdict: Verdict, old: str | None) -> None:
        entry = verdict.entry
        entry.state, entry.reason = verdict.state, verdict.reason
        self._tally.move(entry.peer, entry.kind, old, verdict.state, verdict.reason)

    def _reopens(self, verdict: Verdict) -> bool:
        entry = verdict.entry
        step = verdict.step if verdict.step is not None else self._run.leases.learner_version
        return self._run.leases.wanted_again(state=verdict.state, version=entry.version, step=step)

    def _receipt(self, entry: RolloutEntry, state: RolloutState) -> int | None:
        if state not in TERMINAL:
            return None
        self._receipts[entry.peer] += 1
        return self._run.receipts[entry.peer] + self._receipts[entry.peer]
