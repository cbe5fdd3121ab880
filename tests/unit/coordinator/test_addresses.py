"""Which addresses a join string names."""

from __future__ import annotations

import json

import pytest

from echo2.coordinator.addresses import known_addresses
from echo2.coordinator.config import load_config
from echo2.coordinator.template import TEMPLATE
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity


def settings(folder, listen, said=()):
    text = TEMPLATE.replace("PEER_ID", Identity(bytes([4]) * 32).peer_id)
    (folder / "coordinator.toml").write_text(f"listen = {json.dumps(listen)}\n{text}")
    (folder / "state").mkdir(exist_ok=True)
    (folder / "state" / "status.json").write_text(json.dumps({"addresses": said}))
    return load_config(folder / "coordinator.toml")


def test_an_address_that_is_set_and_listened_on_is_named_once(tmp_path):
    """The settings and a running coordinator's status mostly say the same; a join string is not longer for it."""
    one, two = "/ip4/192.0.2.1/tcp/4001", "/ip4/192.0.2.1/tcp/4002"
    assert known_addresses(settings(tmp_path, [one], [one, two])) == (one, two)
    assert known_addresses(settings(tmp_path, ["/ip4/0.0.0.0/tcp/4001", "/ip4/192.0.2.1/tcp/0"], [two])) == (two,)


def test_without_an_address_that_can_be_dialled_it_is_said_what_to_set(tmp_path):
    """Listening on every interface says nothing about where that is."""
    with pytest.raises(ConfigurationError, match="set announce"):
        known_addresses(settings(tmp_path, ["/ip4/0.0.0.0/tcp/4001"]))
