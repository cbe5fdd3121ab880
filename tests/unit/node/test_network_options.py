"""The owner's caps on the line, from the command line to the transport and back into the status."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from echo2.node import main
from echo2.node.config import NodeSettings
from echo2.node.status import table
from echo2.p2p import libp2p_transport
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.join import JoinString
from echo2.p2p.nat_view import NatView, PlaceView, PunchOutcome, ReachabilityView
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


def nat_rows(view):
    return [row for row in table({"nat": asdict(view)}) if row not in table({})]


def test_status_tells_whether_others_can_dial_this_node():
    """Yes and where; or no and why, the place at the relay, and what came of each hole punching."""
    yes = NatView(ReachabilityView(reachable=True, proved=("/ip4/192.0.2.1/tcp/4001",), reason=""), (), ())
    assert nat_rows(yes) == [("reachable", "yes, at /ip4/192.0.2.1/tcp/4001")]
    no = NatView(
        ReachabilityView(
            reachable=False,
            unproved=("/ip4/198.51.100.7/tcp/4001",),
            reason="dialled back at 203.0.113.9, nothing led here from port 4001",
        ),
        (PlaceView("R", held=True, reason=""), PlaceView("S", held=False, reason="it is full")),
        (PunchOutcome("P", "not_tried", 0, "no port to dial from"),),
    )
    assert nat_rows(no) == [
        (
            "reachable",
            (
                "leaf: not reachable from outside (dialled back at 203.0.113.9, nothing led here from port 4001; "
                "not told to others: /ip4/198.51.100.7/tcp/4001)"
            ),
        ),
        ("", "as a leaf it takes snapshots and works like any other node, but passes none on"),
        ("relay", "a place at R"),
        ("relay", "it is full"),
        ("hole punching", "P: not tried, 0 tries: no port to dial from"),
    ]
    unknown = NatView(ReachabilityView(), (), ())
    assert nat_rows(unknown) == [("reachable", "not known yet (not asked yet)")]


def test_status_tells_of_the_connections():
    """How many of each kind, and what went over them."""
    network = {
        "connections": [{"via": "direct"}, {"via": "relay"}, {"via": "direct"}],
        "sent_bytes": 2e6,
        "sent_bits_per_second": 1.5e6,
        "received_bits_per_second": 0.0,
    }
    rows = table({"network": network})
    assert ("connections", "2 direct, 1 relay, 2.0 MB sent, 0.0 MB received") in rows
    assert ("moving", "1.50 Mbit/s out, 0.00 Mbit/s in") in rows


async def test_bans_outlive_a_restart(tmp_path, monkeypatch):
    """The node keeps them in its home."""
    asked = {}

    def opened(*_arguments, **named):
        asked.update(named)
        raise ConfigurationError("far enough")

    monkeypatch.setattr(libp2p_transport, "open_libp2p_transport", opened)
    join = JoinString(Identity(b"\x01" * 32).peer_id, ("/ip4/127.0.0.1/tcp/1",), "t", "r")
    with pytest.raises(ConfigurationError, match="far enough"):
        await main._serve(NodeSettings(), join, tmp_path)
    assert asked["state_dir"] == tmp_path
