"""The kill storm, small: its plans, and a few kills of real processes. The large one is `kill_storm.py --kills 100`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from e2e.storm_schedule import KILLS_MAX, SHARES, kind_of, plan_run
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).with_name("kill_storm.py")


@given(seed=st.integers(0, 2**32), run=st.integers(0, 100), kills_max=st.integers(0, 20))
def test_a_plan_is_its_seeds_and_no_larger_than_asked(seed, run, kills_max):
    """The same seed and run give the same plan; it kills at least once, and never more often than is left to do."""
    plan = plan_run(seed, run, kills_max)
    assert plan == plan_run(seed, run, kills_max)
    assert min(1, kills_max) <= plan.kills <= min(kills_max, KILLS_MAX)
    assert all(0 <= strike.part < 1 and len(set(strike.targets)) == len(strike.targets) for strike in plan.strikes)


def test_plans_strike_every_kind_in_every_phase():
    """Over two hundred plans each kind of process is struck, each phase, pairs, and some again in their restart."""
    strikes = [strike for run in range(200) for strike in plan_run(1, run, KILLS_MAX).strikes]
    kinds = Counter(kind_of(target) for strike in strikes for target in strike.targets)
    assert set(kinds) == {"coordinator", "learner", "node", "engine", "scorer"}
    assert min(kinds.values()) > 100
    assert {strike.phase for strike in strikes} == set(SHARES)
    assert sum(len(strike.targets) == 2 for strike in strikes) > 50
    assert sum(strike.again is not None for strike in strikes) > 50


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found by a Linux subreaper")
def test_a_storm_of_twelve_kills_loses_nothing(tmp_path):
    """Twelve kills at random moments of a few runs: each run finishes, all sums agree, no process is left."""
    argv = [sys.executable, str(SCRIPT), "--kills", "12", "--seed", "5", "--pace", "3", "--out", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kills"] >= 12
    assert said["failures"] == []
