"""Whole runs in virtual time, judged by checkers that know nothing of the system."""

import pytest
from sim.checkers import (
    Resume,
    Step,
    Trace,
    Trained,
    nothing_acknowledged_lost,
    nothing_consumed_twice,
    staleness_bounded,
)
from sim.pinned import run_pinned

from echo2.coordinator.simulate import Scenario, Simulation, random_scenario

SEEDS = range(50)


def play(scenario):
    return run_pinned(Simulation(scenario).run, seed=scenario.seed)


def trace_of(observed):
    trace = Trace(acknowledged=observed.acknowledged, ledger=observed.ledger, receipts=observed.receipts)
    for kind, epoch, what in observed.events:
        if kind == "resume":
            trace.learner.append(Resume(what))
        else:
            batch = tuple(Trained(one.lease_id, one.sample, one.ordinal, one.version) for one in what.rollouts)
            trace.learner.append(Step(epoch, what.step, batch))
    return trace


def judge(scenario, observed):
    trace = trace_of(observed)
    findings = nothing_consumed_twice(trace) + nothing_acknowledged_lost(trace)
    findings += staleness_bounded(trace, scenario.S)
    if observed.run_state != "finished":
        findings.append(f"the run is {observed.run_state}: {observed.waiting}")
    if observed.submitted_by_nodes != len(observed.ledger):
        findings.append(f"nodes count {observed.submitted_by_nodes} submitted, the ledger {len(observed.ledger)}")
    consumed = sum(state == "consumed" for state in observed.ledger.values())
    if observed.consumed_by_learner != consumed:
        findings.append(f"the learner counts {observed.consumed_by_learner} consumed, the ledger {consumed}")
    return findings


def test_a_quiet_run_trains_every_step_on_full_batches():
    """Without faults each step consumes exactly R rollouts, and both evaluations are complete."""
    scenario = Scenario(seed=1)
    observed = play(scenario)
    assert judge(scenario, observed) == []
    steps = [what for kind, _, what in observed.events if kind == "step"]
    assert [len(batch.rollouts) for batch in steps] == [scenario.R] * scenario.steps
    assert observed.evaluations == {0: scenario.heldout, scenario.steps: scenario.heldout}


@pytest.mark.parametrize("seed", SEEDS)
def test_crashes_and_lost_messages_break_no_promise(seed):
    """Seeded kills of any process and lost pieces of streams: the run finishes, and all three checkers are content."""
    scenario = random_scenario(seed)
    assert judge(scenario, play(scenario)) == []


def test_a_seed_repeats_exactly():
    """The same scenario twice is the same history, so a failing seed can be looked into."""
    scenario = random_scenario(3)
    first, second = play(scenario), play(scenario)
    assert first.ledger == second.ledger
    assert first.seconds == second.seconds
    assert first.receipts == second.receipts
