from __future__ import annotations

import hashlib
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from echo2.coordinator.api import BODY_BYTES_MAX, make_api
from echo2.coordinator.views import EvaluationView, EventView, NodeView, PoolView, RolloutCounts, RunView
from echo2.p2p.errors import Refused
from echo2.p2p.identity import Identity

TOKEN = "operators-own-token"
PEER = Identity(b"\x02" * 32).peer_id
STRANGER = Identity(b"\x03" * 32).peer_id
AUTH = {"Authorization": f"Bearer {TOKEN}"}


class FakeDesk:
    """Two fixed views, and a list of the changes asked for."""

    def __init__(self):
        self.changes = []
        self.trouble = ""

    def pool_view(self):
        return PoolView(
            coordinator=PEER, addresses=("/ip4/127.0.0.1/tcp/1",), nodes_healthy=1, nodes_late=0, nodes_dead=0,
            nodes_suspended=0, mu_pool=2.5, mu_min=None, t_bcast_seconds=0.5, t_train_seconds=None,
            refused={"rejected: manifest": 3}, protocol_errors=1, trouble=self.trouble,
        )  # fmt: skip

    def nodes_view(self):
        gone = ("suspend_node", PEER) in [change[:2] for change in self.changes]
        return (
            NodeView(
                peer=PEER, name="n0", software="echo2 0.1", addresses=(),
                state="suspended" if gone else "active", state_reason="", health="healthy", last_seen_seconds=1.0,
                node_says="generating", epoch=0, version=2, version_lag=0, mu=1.5,
                tokens_per_second=9.0, leases_held=1, samples_held=2, accepted=10, rejected=1, evaluated=0,
                rollouts=RolloutCounts(submitted=11, consumed=10, rejected=1), protocol_errors=0, reason="",
            ),
        )  # fmt: skip

    def runs_view(self):
        return (self.run_view("sums"),)

    def run_view(self, run):
        if run != "sums":
            raise KeyError(run)
        return RunView(
            run="sums", task="sums", model="tiny", state="running", state_reason="", learner=PEER,
            learner_connected=True, learner_status="training", epoch=0, version=2, learner_version=3, steps=100,
            staleness_max=3, publish_period=2, rollouts_per_step=256, group_size=8, waiting="", reserved=5,
            reserved_max=9, outstanding=1, rollouts=RolloutCounts(submitted=11, consumed=10, rejected=1), evaluated=4,
            evaluations=(EvaluationView(version=0, purpose="baseline", size=4, count=4, mean=0.25, complete=True),),
            series=(), reward_mean=0.5, staleness=1, kl=0.001, bubble=0.1, t_train_seconds=None, t_bcast_seconds=0.5,
            staleness_estimate=2,
        )  # fmt: skip

    def create_token(self, *, uses, expires_seconds, actor, reason):
        self.changes.append(("create_token", uses, expires_seconds, actor, reason))
        return "new-token"

    def suspend_node(self, peer, *, actor, reason):
        self.changes.append(("suspend_node", peer, actor, reason))

    def restore_node(self, peer, *, actor, reason):
        self.changes.append(("restore_node", peer, actor, reason))

    def decisions_view(self):
        return [{"at": 1.0, "run": "sums", "action": "activate", "chosen": [PEER]}]

    def events_view(self, *, limit, before):
        event = EventView(id=7, wall_seconds=1.0, actor="operator", action="token made", subject="1 uses", reason="r")
        return [event.model_copy(update={"reason": f"{limit} before {before}"})]

    def pause_run(self, run, *, actor, reason):
        self.changes.append(("pause_run", run, actor, reason))

    def resume_run(self, run, *, actor, reason):
        raise Refused("run-state", "the run is running, not paused")

    def stop_run(self, run, *, actor, reason):
        raise ZeroDivisionError


def client_of(desk, *, loopback=True, base="http://127.0.0.1:8080"):
    app = make_api(
        desk,
        join=lambda token: f"echo2://{PEER}@1.2.3.4:1/sums?token={token}",
        token_sha256=hashlib.sha256(TOKEN.encode()).digest(),
        loopback=loopback,
        version="0.1.0",
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url=base)


def is_problem(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == status
    assert set(body) == {"type", "title", "status", "detail"}
    return body["detail"]


READS = [
    "/healthz",
    "/v1/pool",
    "/v1/nodes",
    f"/v1/nodes/{PEER}",
    "/v1/runs",
    "/v1/runs/sums",
    "/v1/events",
    "/v1/decisions",
    "/metrics",
]
CHANGES = [
    ("/v1/tokens", {}),
    ("/v1/runs/sums/pause", {}),
    ("/v1/runs/sums/resume", {}),
    ("/v1/runs/sums/stop", {}),
    (f"/v1/nodes/{PEER}/suspend", {"reason": "forged"}),
    (f"/v1/nodes/{PEER}/restore", {}),
]


@pytest.mark.parametrize("path", READS)
async def test_reads_are_open_on_loopback(path):
    """On loopback everything can be read without a token."""
    async with client_of(FakeDesk()) as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("path", [*READS, "/openapi.json", "/nowhere"])
async def test_off_loopback_every_request_needs_the_token(path):
    """Off loopback nothing is answered without the token, not even that a path does not exist."""
    async with client_of(FakeDesk(), loopback=False, base="http://192.0.2.1:8080") as client:
        bare = await client.get(path)
        is_problem(bare, 401)
        assert bare.headers["www-authenticate"].startswith("Bearer")
        is_problem(await client.get(path, headers={"Authorization": "Bearer wrong"}), 403)
        assert (await client.get(path, headers=AUTH)).status_code in ({404} if path == "/nowhere" else {200})


@pytest.mark.parametrize(("path", "body"), CHANGES)
@pytest.mark.parametrize("loopback", [True, False])
async def test_changes_always_need_the_token(path, body, loopback):
    """A change without the token is 401, with a wrong one 403, and nothing happens."""
    desk = FakeDesk()
    async with client_of(desk, loopback=loopback) as client:
        is_problem(await client.post(path, json=body), 401)
        for wrong in ("Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN):
            is_problem(await client.post(path, json=body, headers={"Authorization": wrong}), 401)
        for wrong in (f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer é".encode()):
            is_problem(await client.post(path, json=body, headers={"Authorization": wrong}), 403)
    assert desk.changes == []


async def test_token_is_created_with_its_join_string():
    """A new token is shown once, as the join string a volunteer pastes, and never cached."""
    desk = FakeDesk()
    async with client_of(desk) as client:
        answer = await client.post("/v1/tokens", json={"uses": 3, "expires_hours": 2}, headers=AUTH)
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json() == {
        "token": "new-token",
        "join": f"echo2://{PEER}@1.2.3.4:1/sums?token=new-token",
        "uses": 3,
        "expires_hours": 2.0,
    }
    assert desk.changes == [("create_token", 3, 7200.0, "operator", "made over REST")]


async def test_changes_reach_the_service_with_actor_and_reason():
    """Pausing and suspending hand on who asked and why, and answer with the new view."""
    desk = FakeDesk()
    async with client_of(desk) as client:
        paused = await client.post("/v1/runs/sums/pause", json={"reason": "disk"}, headers=AUTH)
        gone = await client.post(f"/v1/nodes/{PEER}/suspend", json={"reason": "forged"}, headers=AUTH)
    assert paused.json()["run"] == "sums"
    assert gone.json()["state"] == "suspended"
    assert desk.changes == [("pause_run", "sums", "operator", "disk"), ("suspend_node", PEER, "operator", "forged")]


@pytest.mark.parametrize("content", [b"", b"{}"])
@pytest.mark.parametrize("kind", [None, "application/json", "application/x-www-form-urlencoded"])
async def test_a_change_needs_no_body(content, kind):
    """`curl -X POST`, with or without -d '': every default holds. Only what has no default must be said."""
    if content and kind != "application/json":
        return
    headers = AUTH if kind is None else AUTH | {"Content-Type": kind}
    desk = FakeDesk()
    async with client_of(desk) as client:
        for path in ("/v1/tokens", "/v1/runs/sums/pause", f"/v1/nodes/{PEER}/restore"):
            assert (await client.post(path, content=content, headers=headers)).status_code in {200, 201}, path
        is_problem(await client.post(f"/v1/nodes/{PEER}/suspend", content=content, headers=headers), 422)
    assert desk.changes == [
        ("create_token", 1, 72 * 3600.0, "operator", "made over REST"),
        ("pause_run", "sums", "operator", "asked over REST"),
        ("restore_node", PEER, "operator", "asked over REST"),
    ]


async def test_a_body_that_is_not_said_to_be_json_is_told_so():
    """curl's -d alone sends a form."""
    headers = AUTH | {"Content-Type": "application/x-www-form-urlencoded"}
    async with client_of(FakeDesk()) as client:
        answer = await client.post("/v1/runs/sums/pause", content=b'{"reason": "x"}', headers=headers)
    assert "send it with the header Content-Type: application/json" in is_problem(answer, 422)


async def test_the_audit_log_is_paged():
    """The newest first, so many, before an id."""
    async with client_of(FakeDesk()) as client:
        (event,) = (await client.get("/v1/events?limit=5&before=9")).json()
        assert (event["id"], event["action"], event["reason"]) == (7, "token made", "5 before 9")
        is_problem(await client.get("/v1/events?limit=0"), 422)


async def test_what_cannot_be_done_says_why():
    """Unknown names are 404, a change the state forbids 409, a bug 500 without its traceback."""
    async with client_of(FakeDesk()) as client:
        assert "no run" in is_problem(await client.get("/v1/runs/none"), 404)
        assert "no node" in is_problem(await client.get(f"/v1/nodes/{STRANGER}"), 404)
        is_problem(await client.post("/v1/runs/none/pause", json={}, headers=AUTH), 404)
        is_problem(await client.post(f"/v1/nodes/{STRANGER}/suspend", json={"reason": "x"}, headers=AUTH), 404)
        detail = is_problem(await client.post("/v1/runs/sums/resume", json={}, headers=AUTH), 409)
        assert detail == "the run is running, not paused"
        assert "ZeroDivision" not in is_problem(await client.post("/v1/runs/sums/stop", json={}, headers=AUTH), 500)
        is_problem(await client.get("/nowhere"), 404)
        is_problem(await client.delete("/v1/pool", headers=AUTH), 405)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokens", {"uses": 0}),
        ("/v1/tokens", {"uses": "3"}),
        ("/v1/tokens", {"use": 3}),
        ("/v1/tokens", {"expires_hours": -1}),
        ("/v1/tokens", []),
        (f"/v1/nodes/{PEER}/suspend", {}),
        (f"/v1/nodes/{PEER}/suspend", {"reason": ""}),
        (f"/v1/nodes/{PEER}/suspend", {"reason": "x" * 513}),
        ("/v1/nodes/not-a-peer/suspend", {"reason": "x"}),
        ("/v1/runs/a%20b/pause", {}),
    ],
)
async def test_bad_bodies_are_refused(path, body):
    """A body or a name outside the schema is 422 naming the field, and changes nothing."""
    desk = FakeDesk()
    async with client_of(desk) as client:
        is_problem(await client.post(path, json=body, headers=AUTH), 422)
    assert desk.changes == []


async def test_body_is_bounded():
    """A body above the bound is 413, whether its length is announced or not."""
    large = b'{"reason": "' + b"x" * BODY_BYTES_MAX + b'"}'

    async def pieces():
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    desk = FakeDesk()
    async with client_of(desk) as client:
        is_problem(await client.post("/v1/tokens", content=large, headers=AUTH), 413)
        is_problem(await client.post("/v1/tokens", content=pieces(), headers=AUTH), 413)
        is_problem(await client.post("/v1/tokens", content=b"x", headers=AUTH | {"Content-Length": "-1"}), 413)
    assert desk.changes == []


@pytest.mark.parametrize("host", ["evil.example:8080", "", "127.0.0.1.evil.example"])
async def test_other_names_for_loopback_are_refused(host):
    """A web page whose name points at 127.0.0.1 cannot read the pool."""
    async with client_of(FakeDesk()) as client:
        is_problem(await client.get("/v1/pool", headers={"Host": host}), 403)


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
async def test_loopback_has_several_names(host):
    """Every usual way to write loopback is answered."""
    async with client_of(FakeDesk()) as client:
        assert (await client.get("/v1/pool", headers={"Host": host})).status_code == 200


async def test_health_tells_trouble():
    """While the coordinator refuses requests, healthz says why."""
    desk = FakeDesk()
    async with client_of(desk) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok", "trouble": ""}
        desk.trouble = "the disk is full"
        assert (await client.get("/healthz")).json() == {"status": "trouble", "trouble": "the disk is full"}


async def test_metrics_parse_and_leave_out_what_is_not_measured():
    """The scrape is valid, carries the numbers of the views, and shows no 0 for what nobody measured."""
    async with client_of(FakeDesk()) as client:
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    run = ("run", "sums")
    assert samples["echo2_nodes", (("health", "healthy"), ("state", "active"))] == 1
    assert samples["echo2_policy_version", (run,)] == 2
    assert samples["echo2_rollouts_total", (("reason", ""), ("state", "consumed"))] == 10
    assert samples["echo2_rollouts_received_total", (run,)] == 11
    assert samples["echo2_rollouts_total", (("reason", "manifest"), ("state", "rejected"))] == 3
    assert samples["echo2_heldout_reward_mean", (("purpose", "baseline"), run)] == 0.25
    assert not [key for key in samples if key[0] in {"echo2_t_train_seconds", "echo2_mu_min_rollouts_per_second"}]


async def test_openapi_without_pages_from_elsewhere():
    """The schema lists every path; there are no documentation pages that load scripts from a CDN."""
    async with client_of(FakeDesk()) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        for page in ("/docs", "/redoc"):
            is_problem(await client.get(page), 404)
    assert "/v1/nodes/{peer}/suspend" in paths
    assert paths["/v1/nodes/{peer}/suspend"]["post"]["security"] == [{"HTTPBearer": []}]
    assert "security" not in paths["/v1/pool"]["get"]
    assert "Problem" in json.dumps(paths["/v1/tokens"]["post"]["responses"]["401"])
