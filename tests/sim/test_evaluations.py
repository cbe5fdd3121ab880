"""Held-out evaluations beside training, in virtual time."""

import math
from dataclasses import replace

import pytest
from sim.pinned import run_pinned

from echo2.coordinator.simulate import Scenario, Simulation, random_scenario

QUIET = Scenario(seed=1, steps=12, heldout=8)
POOL_BOUND = replace(QUIET, rollout_seconds=0.5, nodes=2)
CRASHED_SEEDS = range(400, 408)


def play(scenario):
    return run_pinned(Simulation(scenario).run, seed=scenario.seed)


def training_seconds(observed):
    """From the end of the first step to the end of the last: the baseline evaluation is the gate's, not training's."""
    return observed.trained_seconds - observed.first_trained_seconds


def right(observed, scenario):
    """Every number is the mean of the answers leased under its own version, and each of them counts once."""
    for version, mean in observed.means.items():
        rewards = observed.heldout.get(version, [])
        assert observed.evaluations[version] == len(rewards)
        assert mean == (math.fsum(rewards) / len(rewards) if rewards else None)
        assert (len(rewards) == scenario.heldout * scenario.eval_samples) is (version not in observed.evaluations_ended)


def test_evaluations_in_the_pools_idle_time_cost_training_nothing():
    """Where the learner is the slower side, each version is evaluated whole and the steps end when they would have."""
    scenario = replace(QUIET, eval_every=2)
    observed = play(scenario)
    assert observed.evaluations == dict.fromkeys(range(0, 13, 2), 8)
    assert observed.evaluations_ended == {}
    assert training_seconds(observed) == pytest.approx(training_seconds(play(QUIET)), rel=0.01)
    right(observed, scenario)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_a_slow_pool_gives_evaluations_no_more_than_their_share(share):
    """Where the pool is the slower side, training takes at most 1 / (1 - share) of its time, and a step's slack."""
    scenario = replace(POOL_BOUND, eval_every=2, eval_samples=4, eval_share=share)
    observed, without = play(scenario), play(replace(POOL_BOUND, eval_samples=4))
    slack_seconds = scenario.R * scenario.rollout_seconds / scenario.nodes + scenario.train_seconds
    assert training_seconds(observed) <= training_seconds(without) / (1 - share) + slack_seconds
    asked = sum(count for version, count in observed.evaluations.items() if 0 < version < scenario.steps)
    trained = sum(state == "consumed" for state in observed.ledger.values())
    assert asked <= share / (1 - share) * trained + scenario.R  # what the last wait of a slow node leaves idle is free
    right(observed, scenario)


def test_a_version_that_no_node_has_any_more_is_ended_with_its_reason():
    """Nodes move on before every prompt is answered: the evaluation ends, and the run does."""
    scenario = replace(POOL_BOUND, eval_every=4)
    observed = play(scenario)
    assert observed.run_state == "finished"
    assert set(observed.evaluations) == {0, 4, 8, 12}
    assert set(observed.evaluations_ended) == {4, 8}
    assert observed.evaluations_ended[4].startswith("no node has version 4 any more, version 6 is published; ")
    right(observed, scenario)


def test_evaluations_come_as_often_as_published_versions_allow():
    """Every version asked for, with kappa = 2, is every published one; every third, every second published one."""
    assert set(play(replace(QUIET, eval_every=1)).evaluations) == set(range(0, 13, 2))
    assert set(play(replace(QUIET, eval_every=3)).evaluations) == {0, 4, 8, 12}


@pytest.mark.parametrize("seed", CRASHED_SEEDS)
def test_crashes_put_no_answer_under_another_version(seed):
    """With kills and losses the run finishes, and the numbers in the ledger are those of its answers."""
    scenario = replace(random_scenario(seed), eval_every=2, eval_samples=2, eval_share=0.2)
    observed = play(scenario)
    assert observed.run_state == "finished"
    right(observed, scenario)


def test_evaluations_never_reach_the_learner():
    """With them and without, each step consumes exactly R training rollouts."""
    observed = play(replace(POOL_BOUND, eval_every=2, eval_samples=2, eval_share=0.5))
    batches = [what for kind, _, what in observed.events if kind == "step"]
    assert [len(batch.rollouts) for batch in batches] == [POOL_BOUND.R] * POOL_BOUND.steps
    consumed = {(one.lease_id, one.sample) for batch in batches for one in batch.rollouts}
    assert consumed == {key for key, state in observed.ledger.items() if state == "consumed"}
