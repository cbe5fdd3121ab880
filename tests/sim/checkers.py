"""Three judges of a finished simulation, written apart from the system: they import nothing of it.

They read a trace of what the outside could see: what nodes were told is safe, what the learner trained on, what the
ledger says at the end. Each returns its findings as sentences; none means the property held.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

TERMINAL = {"consumed", "stale", "withdrawn", "rejected", "duplicate"}
LEFT = {"held", "admitted"}


@dataclass(frozen=True)
class Trained:
    """One rollout in a training batch: who it is, which slot of which group it fills, its policy version."""

    lease: bytes
    sample: int
    ordinal: int
    version: int


@dataclass(frozen=True)
class Step:
    """Step `number` as a learner of `epoch` began it."""

    epoch: int
    number: int
    batch: tuple[Trained, ...]


@dataclass(frozen=True)
class Resume:
    """A learner came back at `version`: every step from `version` on, trained before this, is undone."""

    version: int


@dataclass
class Trace:
    """What was seen, in order of time where order matters."""

    acknowledged: set[tuple[bytes, int]] = field(default_factory=set)
    learner: list[Step | Resume] = field(default_factory=list)
    ledger: dict[tuple[bytes, int], str] = field(default_factory=dict)
    receipts: list[tuple[str, int, bytes, int, str]] = field(default_factory=list)


def lineage(trace: Trace) -> list[Step]:
    """The steps that made the final policy: those not undone by a later resume."""
    steps: list[Step] = []
    for event in trace.learner:
        if isinstance(event, Resume):
            steps = [step for step in steps if step.number < event.version]
        else:
            steps.append(event)
    return steps


def nothing_consumed_twice(trace: Trace) -> list[str]:
    """In the final policy's lineage no rollout and no slot of a group was trained on twice, and the ledger agrees."""
    steps = lineage(trace)
    findings = []
    numbers = [step.number for step in steps]
    if numbers != list(range(len(numbers))):
        findings.append(f"steps of the lineage are {numbers}, not 0, 1, 2, ...")
    batch = [rollout for step in steps for rollout in step.batch]
    for what, counts in (
        ("rollout", Counter((rollout.lease, rollout.sample) for rollout in batch)),
        ("slot", Counter((rollout.ordinal, rollout.sample) for rollout in batch)),
    ):
        findings += [f"{what} {key} was consumed {count} times" for key, count in counts.items() if count > 1]
    trained = {(rollout.lease, rollout.sample) for rollout in batch}
    consumed = {key for key, state in trace.ledger.items() if state == "consumed"}
    findings += [f"{key} is consumed in the ledger but in no step of the lineage" for key in consumed - trained]
    findings += [f"{key} was trained on but is {trace.ledger.get(key)} in the ledger" for key in trained - consumed]
    return findings


def nothing_acknowledged_lost(trace: Trace) -> list[str]:
    """Whatever a node was told is safe is in the ledger, in a known state, and receipts match it, one each."""
    findings = [f"{key} was acknowledged and is not in the ledger" for key in trace.acknowledged - set(trace.ledger)]
    findings += [
        f"{key} has the unknown state {state}" for key, state in trace.ledger.items() if state not in TERMINAL | LEFT
    ]
    told: dict[tuple[bytes, int], str] = {}
    for _peer, _sequence, lease, sample, state in trace.receipts:
        if told.setdefault((lease, sample), state) != state:
            findings.append(f"{(lease, sample)} has receipts for {told[lease, sample]} and for {state}")
        if trace.ledger.get((lease, sample)) != state:
            findings.append(
                f"{(lease, sample)} has a receipt for {state}, the ledger says {trace.ledger.get((lease, sample))}"
            )
    sequences = Counter((peer, sequence) for peer, sequence, *_ in trace.receipts)
    findings += [
        f"receipt {key} came {count} times with different contents" for key, count in sequences.items() if count > 1
    ]
    return findings


def staleness_bounded(trace: Trace, staleness_max: int) -> list[str]:
    """No step, undone ones included, used a rollout more than S versions old, or one from the future."""
    findings = []
    for step in trace.learner:
        if isinstance(step, Resume) or not step.batch:
            continue
        oldest = min(rollout.version for rollout in step.batch)
        newest = max(rollout.version for rollout in step.batch)
        if step.number - oldest > staleness_max:
            findings.append(
                f"step {step.number} used version {oldest}: staleness {step.number - oldest} > {staleness_max}"
            )
        if newest > step.number:
            findings.append(f"step {step.number} used version {newest}, which did not exist yet")
    return findings
