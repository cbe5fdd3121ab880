"""The owner's caps on the line, from the command line to the transport and back into the status."""

from __future__ import annotations

import pytest

from echo2.node.config import NodeSettings
from echo2.node.status import table
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import make_settings


def test_caps_reach_the_transport():
    """Megabits of the owner are bits of the transport; none is none."""
    limits = NodeSettings(upload_mbit=2.5).limits
    assert (limits.upload_bits_per_second, limits.download_bits_per_second) == (2_500_000, None)


@pytest.mark.parametrize("value", [0, -1, "fast", 1e9])
def test_cap_that_is_none_is_a_mistake_of_the_owner(value):
    """A cap of nothing, or not a number, is said in one line."""
    with pytest.raises(ConfigurationError, match="upload_mbit"):
        make_settings({"upload_mbit": value}, NodeSettings, source="the command line")


def test_status_tells_of_the_line_and_of_whom_it_cannot_reach():
    """The table has a row for the caps, one for each unreachable peer with what was tried, one for each ban."""
    network = {
        "upload_bits_per_second_max": 2_500_000.0,
        "unreachable": [{"peer": "P", "tried": "/ip4/192.0.2.1/tcp/1: refused", "retry_seconds": 3.0}],
        "bans": [{"peer": "Q", "reason": "5 protocol errors", "seconds": 60.0}],
    }
    rows = table({"network": network})
    assert ("line", "up at most 2.5 Mbit/s") in rows
    assert ("cannot reach", "P: /ip4/192.0.2.1/tcp/1: refused") in rows
    assert ("refuses", "Q for 60 s: 5 protocol errors") in rows
    assert "line" not in dict(table({}))
