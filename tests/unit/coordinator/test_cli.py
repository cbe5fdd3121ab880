"""What the demo's command line says of itself."""

from __future__ import annotations

import re
from types import SimpleNamespace

from typer.testing import CliRunner

from echo2.coordinator import cli
from echo2.coordinator.cli import app
from echo2.coordinator.demo_options import PRESETS


def test_the_help_shows_the_defaults_that_hold():
    """Those that depend on the model too, which brackets in the text of an option would hide."""
    shown = re.sub(r"[^\w.;:()-]+", " ", CliRunner().invoke(app, ["demo", "--help"]).output)
    tiny, small = PRESETS["tiny"], PRESETS["smollm2"]
    assert f"default: ({tiny.steps}; smollm2: {small.steps})" in shown
    assert "default: (2e-4; smollm2: 5e-6)" in shown
    assert (tiny.learning_rate, small.learning_rate) == (2e-4, 5e-6)
    assert f"default: ({tiny.S})" in shown
    assert "default: (S - 1)" in shown
    assert {preset.S - 1 for preset in PRESETS.values()} == {preset.kappa for preset in PRESETS.values()}


def test_plain_output_is_one_line_a_step(monkeypatch, capsys):
    """What is waited for changes many times within a step; only a long wait has a line of its own."""
    monkeypatch.setattr(cli, "plain_line", lambda state: f"step {state.step}")
    show, _ = cli._lines()
    for look in range(60):
        second = look / 2
        show(SimpleNamespace(step=look // 20, phase="training", waiting_for=f"reason {look}", seconds=second))
    assert capsys.readouterr().err.splitlines() == ["step 0", "step 1", "step 2"]
    for second in range(30, 61):
        show(SimpleNamespace(step=2, phase="training", waiting_for="", seconds=second))
    assert capsys.readouterr().err.splitlines() == ["step 2"] * 2


def test_plain_output_tells_each_stage_of_the_start(monkeypatch, capsys):
    """Before the first step a person wants to know what takes so long."""
    monkeypatch.setattr(cli, "plain_line", lambda state: state.waiting_for)
    show, _ = cli._lines()
    for stage in ("the coordinator", "the coordinator", "the snapshot", "the snapshot", "the nodes"):
        show(SimpleNamespace(step=0, phase="starting", waiting_for=stage, seconds=1.0))
    assert capsys.readouterr().err.splitlines() == ["the coordinator", "the snapshot", "the nodes"]
