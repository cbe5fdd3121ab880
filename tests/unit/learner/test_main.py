"""What the learner's process hands to its transport."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from echo2.learner import main
from echo2.learner.config import LearnerConfig
from echo2.p2p import libp2p_transport
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.settings import make_settings


async def test_bans_outlive_a_restart(tmp_path, monkeypatch):
    """They are kept in the learner's home."""
    asked = {}

    def opened(*_arguments, **named):
        asked.update(named)
        raise ConfigurationError("far enough")

    monkeypatch.setattr(libp2p_transport, "open_libp2p_transport", opened)
    coordinator = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(b'c' * 32).peer_id}"
    values = {"home": "home", "coordinator": coordinator, "run": "r", "model_dir": "m"}
    config = make_settings(values, LearnerConfig, source="l.toml", folder=tmp_path)
    with pytest.raises(ConfigurationError, match="far enough"):
        await main._serve(config, Identity(b"l" * 32), None, None)
    assert asked["state_dir"] == tmp_path / "home"


def test_a_check_prints_every_setting_but_the_join_string(tmp_path):
    """What is shown around must not let anyone in; a mistake is told as when the learner starts."""
    coordinator = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(b'c' * 32).peer_id}"
    path = tmp_path / "learner.toml"
    path.write_text(f'home = "h"\ncoordinator = "{coordinator}"\nrun = "r"\nmodel_dir = "m"\n')
    found = json.loads(CliRunner().invoke(main.app, ["check", "--config", str(path)]).stdout)
    assert set(found) == set(LearnerConfig.model_fields) - {"coordinator"}
    assert found["train"]["learning_rate"] == 2e-4
    path.write_text(path.read_text() + "[train]\nlr = 1\n")
    mistake = CliRunner().invoke(main.app, ["check", "--config", str(path)]).exception
    assert isinstance(mistake, ConfigurationError)
    assert "unknown key 'train.lr'" in str(mistake)
