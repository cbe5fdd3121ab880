"""REST and nodes while the database has no room: refused in words, and nothing that was acknowledged is lost."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import httpx
import pytest
import sqlalchemy as sa
import trio
import trio.testing
from rest_stage import AUTH, BASE, TOKEN, Stage, is_problem

from echo2.coordinator.access import AccessBook
from echo2.coordinator.api import make_api
from echo2.coordinator.rest_gate import Door
from echo2.p2p.errors import Refused

pytestmark = pytest.mark.slow_on_postgresql


def rest_of(service, stage):
    """REST over a real service, everything else from the stage."""
    access = AccessBook(
        service._office.ledger,
        own={"operator": hashlib.sha256(TOKEN.encode()).digest()},
        wall=lambda: stage.wall,
        entropy=stage.access._entropy,
    )
    app = make_api(replace(stage.rooms, desk=service, access=access), door=Door(), version="0.1.0")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=AUTH)


def room(ledger, more_pages):
    """So many pages more than the database has now; as SQLite on a disk that is full."""
    with ledger.reading() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        pages = connection.scalar(sa.text("PRAGMA page_count")) + more_pages
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")


async def test_on_a_full_disk_changes_are_503_and_what_was_acknowledged_stays(autojump_clock, world, tools, tmp_path):
    """Tokens are made until there is no room; then every change is refused and changes nothing, reads go on, health
    tells, a node's rollouts are refused. With room again all of it works, and a restart knows what was acknowledged."""
    if not world.url.startswith("sqlite"):
        pytest.skip("the bound on pages is SQLite's")
    stage = Stage(tmp_path / "stage-", url=f"sqlite:///{tmp_path / 'stage.sqlite3'}")
    made = {}
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving() as service, rest_of(service, stage) as client:
            await learner.hello()
            await learner.publish()
            await node.join()
            await node.work()
            await trio.testing.wait_all_tasks_blocked(0.1)
            (lease,) = (await node.lease(samples=2)).leases
            ledger = service._office.ledger
            room(ledger, 4)
            for number in range(200):
                body = {"name": f"p{number}", "role": "viewer", "reason": "r" * 500}
                answer = await client.post("/v1/access", json=body)
                if answer.status_code != 201:
                    break
                made[f"p{number}"] = answer.json()["token"]
            assert 0 < len(made) < 100
            room(ledger, 0)
            long = {"reason": "r" * 500}
            refused = 0
            for _ in range(60):
                answer = await client.post("/v1/runs/r1/pause", json=long)
                if answer.status_code == 503:
                    break
                assert answer.status_code == 200  # there was room in a page still
                await client.post("/v1/runs/r1/resume", json=long)
            state = (await client.get("/v1/runs/r1")).json()["state"]
            for path, body in (
                ("/v1/runs/r1/" + ("resume" if state == "paused" else "pause"), long),
                ("/v1/runs/r1/stop", long),
                ("/v1/tokens", long),
                (f"/v1/nodes/{node.peer_id}/ban", long),
                ("/v1/access", {"name": "late", "role": "viewer", **long}),
            ):
                answer = await client.post(path, json=body)
                assert "full" in is_problem(answer, 503)
                assert answer.headers["retry-after"] == "5"
                refused += 1
            assert refused == 5
            health = (await client.get("/healthz")).json()
            assert (health["status"], "full" in health["trouble"]) == ("trouble", True)
            assert (await client.get("/v1/runs/r1")).json()["state"] == state
            assert (await client.get(f"/v1/nodes/{node.peer_id}")).json()["state"] == "active"
            for path in ("/v1/pool", "/v1/events?limit=1", "/v1/access", "/metrics"):
                assert (await client.get(path)).status_code == 200
            with pytest.raises(Refused) as no_room:
                await node.submit(tools.answer(lease))
            assert (no_room.value.code, no_room.value.retry_seconds) == ("ledger_unavailable", 5.0)
            assert world.run.rollouts.submitted == 0
            room(ledger, 100_000)
            await trio.sleep(2.0)
            assert (await client.get("/healthz")).json()["status"] == "ok"
            (ack,) = await node.submit(tools.answer(lease))
            assert ack.state == "held"
        async with world.serving() as service, rest_of(service, stage) as client:
            assert world.run.rollouts.submitted == 2
            for name, token in made.items():
                who = await client.get("/v1/session", headers={"Authorization": f"Bearer {token}"})
                assert who.json()["name"] == name
            assert {row["name"] for row in (await client.get("/v1/access")).json()} == set(made)
    stage.close()
