"""The learner's owner sees its line as a node's owner does."""

from __future__ import annotations

import json

from unit.learner import test_service as loop

from echo2.learner.service import LearnerService
from echo2.learner.status import LearnerStatus
from echo2.p2p.transport_view import BanView, ConnectionView, TransportView, UnreachableView

VIEW = TransportView(
    upload_bits_per_second_max=None,
    download_bits_per_second_max=None,
    sent_bytes=5,
    received_bytes=7,
    sent_bits_per_second=40.0,
    received_bits_per_second=56.0,
    inbound_connections=1,
    unread_bytes=0,
    connections=(ConnectionView(peer="p", via="direct", traffic="bulk", streams=1, round_trip_seconds=0.1),),
    unreachable=(UnreachableView(peer="q", tried="/ip4/192.0.2.1/tcp/1: refused", retry_seconds=3.0),),
    bans=(BanView(peer="r", reason="5 protocol errors", seconds=9.0),),
)


def test_the_status_has_what_the_transport_shows(tmp_path):
    """Connections, bytes and rates, whom it cannot reach and what was tried, whom it refuses: all of it, as JSON."""
    service = LearnerService(
        config=loop.LearnerConfig(home=tmp_path, coordinator="/ip4/127.0.0.1/tcp/1/p2p/" + loop.COORDINATOR.peer_id,
                                  run="demo", model_dir=tmp_path),
        identity=loop.LEARNER,
        transport=None,
        coordinator=None,
        run="demo",
        trainer=None,
        store=None,
        broadcaster=None,
        clock=lambda: 0.0,
        wall=lambda: 0.0,
        network=lambda: VIEW,
    )  # fmt: skip
    status = service.status()
    assert isinstance(status, LearnerStatus)
    assert status.network == VIEW
    assert json.loads(status.model_dump_json())["network"]["unreachable"][0]["tried"].endswith("refused")
