"""Every message handler against structured fuzz; a failing case is shrunk, and belongs into `corpus/` once mended."""

from __future__ import annotations

import os

import pytest
from fuzz import coordinator_stage, learner_stage, node_stage
from fuzz.case import Case, kept
from hypothesis import HealthCheck, Phase, given, settings

EXAMPLES = int(os.environ.get("ECHO2_FUZZ_EXAMPLES", "15"))
"""Cases of each kind in one run of the tests: seconds. `python tests/fuzz/soak.py` runs them by the hour."""

FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="ECHO2_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)

STAGES = {stage.NAME: stage for stage in (coordinator_stage, learner_stage, node_stage)}


@pytest.mark.parametrize("path", [path for stage in STAGES for path in kept(stage)], ids=lambda path: path.stem)
def test_corpus_is_borne(path):
    """A case that once did harm, or reaches far, does none."""
    case = Case.from_json(path.read_text())
    STAGES[case.stage].play(case)


@FUZZ
@given(coordinator_stage.cases())
def test_coordinator_bears_strangers_and_bad_nodes(case):
    """Whatever strangers and an admitted node send, the coordinator lives and the honest node gets on."""
    coordinator_stage.play(case)


@FUZZ
@given(coordinator_stage.cases(("learner",)))
def test_coordinator_bears_a_confused_learner(case):
    """Whatever the learner sends, the coordinator lives."""
    coordinator_stage.play(case)


@FUZZ
@given(node_stage.cases())
def test_node_bears_any_reply_and_any_asker(case):
    """Whatever its coordinator, its sources and strangers send, a node lives, and works again with honest ones."""
    node_stage.play(case)


@FUZZ
@given(learner_stage.cases())
def test_learner_bears_any_reply_and_any_asker(case):
    """Whatever its coordinator and strangers send, the learner lives."""
    learner_stage.play(case)
