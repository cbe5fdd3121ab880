"""Probation in whole runs, in virtual time: the real services, engines and a trainer that cost `trio.sleep`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim.pinned import run_pinned

from echo2.coordinator.simulate import Scenario, Simulation


def play(scenario):
    return run_pinned(Simulation(scenario).run, seed=scenario.seed)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_tiny_pool_is_not_slowed_by_its_probation(nodes):
    """All of its nodes are new and prove themselves on the way; the last step is trained as early, to a tenth."""
    scenario = Scenario(seed=1, nodes=nodes, steps=10)
    observed, plain = play(scenario), play(replace(scenario, warmup_leases=0))
    assert (observed.run_state, plain.run_state) == ("finished", "finished")
    assert list(observed.transitions.values()) == [["joined", "passed"]] * nodes
    assert observed.trained_seconds <= 1.1 * plain.trained_seconds
