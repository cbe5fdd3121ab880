"""What the coordinator's process hands to its transport."""

from __future__ import annotations

import pytest

from echo2.coordinator import serve
from echo2.coordinator.config import CoordinatorConfig
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.settings import make_settings


async def test_bans_outlive_a_restart(tmp_path, monkeypatch):
    """They are kept beside the ledger."""
    asked = {}

    def opened(*_arguments, **named):
        asked.update(named)
        raise ConfigurationError("far enough")

    monkeypatch.setattr(serve, "open_libp2p_transport", opened)
    monkeypatch.setattr(serve, "check_task", lambda run: None)
    monkeypatch.setattr(serve, "load_operator_token_hash", lambda path: None)
    run = {"name": "r", "task": "arithmetic", "model_dir": "m", "learner": Identity(b"\x05" * 32).peer_id, "steps": 1}
    values = {"run": run, "rest": {"port": 0}}
    config = make_settings(values, CoordinatorConfig, source="c.toml", folder=tmp_path)
    with pytest.raises(ConfigurationError, match="far enough"):
        await serve.serve(config)
    assert asked["state_dir"] == tmp_path / "state"
