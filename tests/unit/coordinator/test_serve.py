"""What the coordinator's process hands to its transport."""

from __future__ import annotations

import pytest
import trio

from echo2.coordinator import serve
from echo2.coordinator.config import CoordinatorConfig
from echo2.coordinator.database import IN_USE
from echo2.coordinator.ledger import DatabaseAway
from echo2.p2p.daemon import STATUS_FILE, read_status
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.settings import make_settings


def settings(folder):
    run = {"name": "r", "task": "arithmetic", "model_dir": "m", "learner": Identity(b"\x05" * 32).peer_id, "steps": 1}
    values = {"run": run, "rest": {"port": 0}}
    return make_settings(values, CoordinatorConfig, source="c.toml", folder=folder)


async def test_bans_outlive_a_restart(tmp_path, monkeypatch):
    """They are kept beside the ledger."""
    asked = {}

    def opened(*_arguments, **named):
        asked.update(named)
        raise ConfigurationError("far enough")

    monkeypatch.setattr(serve, "open_libp2p_transport", opened)
    monkeypatch.setattr(serve, "check_task", lambda run: None)
    monkeypatch.setattr(serve, "load_operator_token_hash", lambda path: None)
    config = settings(tmp_path)
    with pytest.raises(ConfigurationError, match="far enough"):
        await serve.serve(config)
    assert asked["state_dir"] == tmp_path / "state"


async def test_a_database_that_is_not_there_yet_is_waited_for(autojump_clock, tmp_path, monkeypatch, caplog):
    """However long: machines come back from a power cut in any order. The status says so, the log once."""
    config = settings(tmp_path)
    config.state_dir.mkdir()

    def opened(*_arguments, **_named):
        if trio.current_time() - begun < 300:
            raise DatabaseAway("the database refused the connection")
        return "a ledger"

    begun = trio.current_time()
    monkeypatch.setattr(serve, "open_ledger", opened)
    assert await serve._open_when_there(config, None) == "a ledger"
    assert read_status(config.state_dir / STATUS_FILE)["waiting_for"] == "the database refused the connection"
    assert caplog.text.count("waiting for the database") == 1


async def test_a_database_that_another_coordinator_has_is_not_waited_for_long(autojump_clock, tmp_path, monkeypatch):
    """Longer than a server needs to find out that it was ourselves, who were killed."""
    config = settings(tmp_path)
    config.state_dir.mkdir()

    def opened(*_arguments, **_named):
        raise DatabaseAway(IN_USE)

    monkeypatch.setattr(serve, "open_ledger", opened)
    begun = trio.current_time()
    with pytest.raises(ConfigurationError, match="another coordinator uses this database"):
        await serve._open_when_there(config, None)
    assert serve.IN_USE_SECONDS <= trio.current_time() - begun <= serve.IN_USE_SECONDS + 2
