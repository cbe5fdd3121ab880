"""A run of several turns on real processes: the game is another task in the settings, all else is as it was."""

from __future__ import annotations

import json

import pytest
from e2e.demo_run import DemoRun

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HONEST_KL_MAX = 1e-3
"""Of an f32 sampler at staleness 0: a mask or a history that is off by one token is far above it."""


async def test_two_steps_of_the_race_on_real_processes(tmp_path):
    """Nodes play, the coordinator plays again and agrees, the learner trains on drawn tokens only; the sums agree."""
    async with DemoRun(tmp_path / "out", "--task", "race", "--steps", "2", "--nodes", "2") as demo:
        summary = await demo.end()
        assert summary["rollouts"]["consumed"] == 512
        assert summary["rollouts"]["rejected"] == 0
        assert demo.metrics()[0]["kl"] < HONEST_KL_MAX
        rows = demo.ledger(
            "SELECT tokens, spans, reward, claimed_reward, details "
            "FROM rollouts JOIN contents USING (id) WHERE state = 'consumed'"
        )
        assert len(rows) == 512
        several = [spans for _, spans, *_ in rows if spans]
        assert several, "some games took more than one turn"
        for tokens, spans, reward, claimed, details in rows:
            lengths = [int.from_bytes(spans[i : i + 4], "little") for i in range(0, len(spans), 4)]
            assert sum(lengths) in {0, len(tokens) // 4}
            assert reward == pytest.approx(claimed, abs=1e-6)
            assert set(json.loads(details)) == {"rules_broken", "turns", "wins"}
