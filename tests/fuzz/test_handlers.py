"""Every handler against structured fuzz; a failing case is shrunk, and belongs into `corpus/` once mended."""

from __future__ import annotations

import os

import pytest
from fuzz.case import Case, kept
from fuzz.source import Fresh
from fuzz.stages import STAGES
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("ECHO2_FUZZ_EXAMPLES", "2"))
"""Worlds of each kind in one run of the tests: seconds. `python tests/fuzz/soak.py` plays thousands of cases each."""

WORLD_CASES = 30
"""Cases in each."""

FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="ECHO2_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)

MODULES = {module.NAME: module for module in STAGES.values()}


@pytest.mark.parametrize("path", [path for stage in MODULES for path in kept(stage)], ids=lambda path: path.stem)
def test_corpus_is_borne(path):
    """A case that once did harm, or reaches far, does none."""
    case = Case.from_json(path.read_text())
    MODULES[case.stage].play(case)


@pytest.mark.parametrize("name", STAGES)
@FUZZ
@given(rng=st.randoms(use_true_random=True))
def test_whatever_the_hostile_send_ours_lives_and_the_honest_get_on(name, rng):
    """Requests in any order, replies of any kind: nothing raises, hangs, stays behind or starves the honest peers."""
    made: list[Fresh] = []
    STAGES[name].soak(name, rng, WORLD_CASES, made)
    assert made[0].cases.total() >= WORLD_CASES
