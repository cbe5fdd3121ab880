"""Two runs share a pool in virtual time: shares by weight, both finish, nothing is lost or counted for the other."""

from collections import Counter

import pytest
from sim.pinned import run_pinned
from sim.runs_world import Run, RunsWorld

from echo2.coordinator import history, placement
from echo2.coordinator.records import list_events

TERMINAL = {"consumed", "stale", "withdrawn", "rejected", "duplicate", "evaluated"}


def judge(world):
    """Findings as sentences; none: each run's sums agree with its learner and its nodes."""
    findings = []
    for run in world.runs.values():
        rollouts, receipts = world.rollouts(run.name), world.receipts(run.name)
        states = Counter(rollouts.values())
        if set(states) - TERMINAL:
            findings.append(f"{run.name}: rollouts without a terminal state, {states}")
        if states["consumed"] != world.consumed_by_learner(run):
            findings.append(f"{run.name}: the learner counts {world.consumed_by_learner(run)} consumed, {states}")
        if {(lease, sample): state for _, _, lease, sample, state in receipts} != rollouts:
            findings.append(f"{run.name}: {len(receipts)} receipts of {len(rollouts)} rollouts, or other states")
        for name in world.nodes:
            numbers = sorted(number for node, number, *_ in receipts if node == name)
            if numbers != list(range(1, len(numbers) + 1)):
                findings.append(f"{run.name}: the receipts of {name} are numbered {numbers[:20]}")
    submitted = sum(spool.counts().submitted for spool in world.spools.values())
    trained = [state for run in world.runs for state in world.rollouts(run).values() if state != "evaluated"]
    if submitted != len(trained):
        findings.append(f"nodes count {submitted} submitted, the ledger {len(trained)}")
    with world.ledger.reading() as connection:
        if history.replay(history.read_bodies(connection)) != history.read_state(connection):
            findings.append("the log does not tell the tables")
    return findings


def moves(world):
    """(subject, reason) of each placement on record, the oldest first."""
    with world.ledger.reading() as connection:
        rows = list_events(connection, limit=1000)
    return [(row.subject, row.reason) for row in reversed(rows) if row.action == "node placed"]


@pytest.mark.parametrize("restart_at", [None, 52.0])
def test_two_runs_share_nine_nodes_by_weight(restart_at, monkeypatch):
    """A second run of half the weight gets its three of nine nodes, one at a time, and when it is over they go back;
    a coordinator that is killed meanwhile puts every node where it was."""
    monkeypatch.setattr(placement, "LOOK_SECONDS", 5.0)
    world = RunsWorld([Run("heavy", 2.0, 45), Run("light", 1.0, 20, starts_seconds=15.0)], restart_at=restart_at)
    run_pinned(world.play, seed=1)
    assert judge(world) == []
    settled = [shares for seconds, shares in world.seen if (restart_at or 40.0) + 7.0 < seconds < 63.0]
    assert settled
    assert all(shares == {"heavy": 6, "light": 3} for shares in settled)
    assert any(shares == {"heavy": 9, "light": 0} for seconds, shares in world.seen if seconds > 63.0)
    told = moves(world)
    assert [reason[:25] for _, reason in told] == [
        *["to heavy: of the open runs"[:25]] * 9,
        *["to light: from heavy: shares"[:25]] * 3,
        *["to heavy: from light: light is finished"[:25]] * 3,
    ]
    assert (
        "shares; 9 live nodes: heavy has 9 of weight 2, share 6.00, light has 0 of weight 1, share 3.00" in told[9][1]
    )
