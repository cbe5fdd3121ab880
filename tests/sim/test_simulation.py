"""Whole runs in virtual time, judged by checkers that know nothing of the system."""

import random
from dataclasses import replace

import pytest
from sim.checkers import (
    Resume,
    Step,
    Trace,
    Trained,
    lineage,
    nothing_acknowledged_lost,
    nothing_consumed_twice,
    staleness_bounded,
)
from sim.pinned import run_pinned

from echo2.coordinator.simulate import PutBack, Scenario, Simulation, random_scenario

SEEDS = range(50)
STOPPED_SEEDS = range(100, 110)
PUT_BACK_SEEDS = range(200, 215)
EPISODE_SEEDS = range(300, 306)
ADAPTER_SEEDS = range(400, 404)


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


def judge(scenario, observed, ends=("finished",)):
    trace = trace_of(observed)
    findings = nothing_consumed_twice(trace) + nothing_acknowledged_lost(trace)
    findings += staleness_bounded(trace, scenario.S)
    if observed.run_state not in ends:
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


@pytest.mark.parametrize("seed", STOPPED_SEEDS)
def test_a_stop_at_any_time_leaves_no_disagreement(seed):
    """Stopped in mid-run, with crashes and losses: what was trained on is consumed, for nodes, ledger and learner."""
    scenario = random_scenario(seed)
    rng = random.Random(seed)
    expected_seconds = 1.5 * scenario.steps * scenario.train_seconds
    scenario = replace(scenario, stop_seconds=rng.uniform(0.1, 1.2) * expected_seconds)
    assert judge(scenario, play(scenario), ends=("stopped", "finished")) == []


def put_back(seed, process):
    """A random scenario in which a copy of the disk of `process` is put back in mid-run."""
    scenario = random_scenario(seed)
    rng = random.Random(seed)
    busy_seconds = 1.5 * scenario.steps * scenario.train_seconds
    copied, back = sorted(rng.uniform(0.3, 1.1) * busy_seconds for _ in range(2))
    return replace(scenario, put_back=PutBack(process, copied, back))


@pytest.mark.parametrize("seed", PUT_BACK_SEEDS)
def test_a_learner_restored_from_an_old_checkpoint_goes_on(seed):
    """The run ends with every step trained; what the undone steps consumed stays consumed and is not used again."""
    scenario = put_back(seed, "learner")
    observed = play(scenario)
    trace = trace_of(observed)
    steps = lineage(trace)
    assert [step.number for step in steps] == list(range(scenario.steps))
    batch = [(one.lease, one.sample) for step in steps for one in step.batch]
    assert len(set(batch)) == len(batch)
    ever = {(one.lease, one.sample) for step in trace.learner if isinstance(step, Step) for one in step.batch}
    consumed = {key for key, state in observed.ledger.items() if state == "consumed"}
    assert set(batch) <= consumed <= ever
    assert nothing_acknowledged_lost(trace) + staleness_bounded(trace, scenario.S) == []
    assert observed.run_state == "finished"
    assert observed.submitted_by_nodes == len(observed.ledger)
    assert observed.consumed_by_learner == len(batch)


@pytest.mark.parametrize("seed", PUT_BACK_SEEDS)
def test_a_ledger_restored_from_an_old_copy_is_told_again(seed):
    """The run ends with every step trained once; what the old ledger still holds gets its true terminal state."""
    scenario = put_back(seed, "coordinator")
    observed = play(scenario)
    trace = trace_of(observed)
    steps = lineage(trace)
    assert [step.number for step in steps] == list(range(scenario.steps))
    slots = [(one.ordinal, one.sample) for step in steps for one in step.batch]
    assert len(set(slots)) == len(slots)
    batch = {(one.lease, one.sample) for step in steps for one in step.batch}
    assert {observed.ledger[key] for key in batch & set(observed.ledger)} <= {"consumed"}
    assert {key for key, state in observed.ledger.items() if state == "consumed"} <= batch
    assert not {"held", "admitted"} & set(observed.ledger.values())
    trace.acknowledged, trace.receipts = observed.acknowledged - observed.forgotten, []
    assert nothing_acknowledged_lost(trace) + staleness_bounded(trace, scenario.S) == []
    assert observed.run_state == "finished"


@pytest.mark.parametrize("at_seconds", [10.0, 14.0, 20.0])
def test_a_coordinator_with_an_empty_ledger_takes_the_run_over(at_seconds):
    """It evaluates the version the learner is at, leases only groups that were never trained on, and ends the run."""
    scenario = Scenario(seed=1, put_back=PutBack("coordinator", 0.0, at_seconds))
    observed = play(scenario)
    assert observed.run_state == "finished"
    steps = lineage(trace_of(observed))
    assert [step.number for step in steps] == list(range(scenario.steps))
    slots = [(one.ordinal, one.sample) for step in steps for one in step.batch]
    assert len(set(slots)) == len(slots) == scenario.steps * scenario.R
    assert scenario.steps in observed.evaluations


@pytest.mark.parametrize("seed", EPISODE_SEEDS)
def test_crashes_break_no_promise_of_a_run_of_several_turns(seed):
    """Episodes are played on nodes and again at the coordinator: the run finishes, and nothing honest is rejected."""
    scenario = replace(random_scenario(seed), task="race")
    observed = play(scenario)
    assert judge(scenario, observed) == []
    assert "rejected" not in observed.ledger.values()
    batches = [what for kind, _, what in observed.events if kind == "step"]
    assert any(rollout.spans for batch in batches for rollout in batch.rollouts)


@pytest.mark.parametrize("seed", ADAPTER_SEEDS)
def test_crashes_break_no_promise_of_a_run_that_publishes_adapters(seed):
    """Nodes that join or come back late get the base with the adapter: the run finishes, nothing is lost or twice."""
    scenario = replace(random_scenario(seed), adapters=True)
    assert judge(scenario, play(scenario)) == []


@pytest.mark.parametrize("process", ["learner", "coordinator"])
@pytest.mark.parametrize("seed", ADAPTER_SEEDS)
def test_what_was_put_back_in_a_run_that_publishes_adapters_goes_on(seed, process):
    """A learner whose base is lost publishes whole; a ledger that forgot the base is told of it again."""
    observed = play(replace(put_back(seed, process), adapters=True))
    assert observed.run_state == "finished", observed.waiting
    assert not {"held", "admitted"} & set(observed.ledger.values())


@pytest.mark.parametrize("at_seconds", [10.0, 14.0, 20.0])
def test_an_empty_ledger_takes_over_a_run_that_publishes_adapters(at_seconds):
    """It hears of the base, then of the adapter that is the newest."""
    observed = play(Scenario(seed=1, adapters=True, put_back=PutBack("coordinator", 0.0, at_seconds)))
    assert observed.run_state == "finished", observed.waiting


def test_a_seed_repeats_exactly():
    """The same scenario twice is the same history, so a failing seed can be looked into."""
    scenario = random_scenario(3)
    first, second = play(scenario), play(scenario)
    assert first.ledger == second.ledger
    assert first.seconds == second.seconds
    assert first.receipts == second.receipts
