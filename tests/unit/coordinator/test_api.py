"""REST: what is shown, what is changed, and what is said of requests that are wrong."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rest_stage import AUTH, BASE, PEER, STRANGER, Stage, is_problem

from echo2.coordinator.ledger import LedgerUnavailable
from echo2.coordinator.rest_gate import BODY_BYTES_MAX, Door
from echo2.coordinator.rest_limits import Limits, Rate

OUTSIDE = Door(open_reads=False)


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.close()


READS = [
    "/healthz",
    "/v1/pool",
    "/v1/nodes",
    f"/v1/nodes/{PEER}",
    "/v1/runs",
    "/v1/runs/sums",
    "/v1/events",
    "/v1/decisions",
    "/v1/runs/sums/metrics",
    "/v1/ledger/postings",
    "/v1/ledger/balances",
    "/v1/ledger/verify",
    "/v1/events/stream",
    "/metrics",
]
CHANGES = [
    ("/v1/tokens", {}),
    ("/v1/runs/sums/pause", {}),
    ("/v1/runs/sums/resume", {}),
    ("/v1/runs/sums/stop", {}),
    (f"/v1/nodes/{PEER}/suspend", {"reason": "forged"}),
    ("/v1/runs/sums/start", {}),
    (f"/v1/nodes/{PEER}/restore", {"reason": "a mistake"}),
    ("/v1/tokens/00112233aabb/revoke", {"reason": "leaked"}),
    ("/v1/access", {"name": "ann", "role": "viewer"}),
    ("/v1/access/ann/revoke", {"reason": "left"}),
]


@pytest.mark.parametrize("path", READS)
async def test_reads_are_open_on_loopback(stage, path):
    """On loopback everything can be read without a token."""
    async with stage.client() as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize("path", [*READS, "/openapi.json", "/nowhere"])
async def test_off_loopback_every_request_needs_a_token(tmp_path, path):
    """Off loopback nothing is answered without a token, not even that a path does not exist."""
    stage = Stage(tmp_path, door=OUTSIDE)
    async with stage.client("http://192.0.2.1:8080") as client:
        bare = await client.get(path)
        is_problem(bare, 401)
        assert bare.headers["www-authenticate"].startswith("Bearer")
        is_problem(await client.get(path, headers={"Authorization": "Bearer wrong"}), 401)
        assert (await client.get(path, headers=AUTH)).status_code in ({404} if path == "/nowhere" else {200})
    stage.close()


@pytest.mark.parametrize(("path", "body"), CHANGES)
@pytest.mark.parametrize("door", [Door(), OUTSIDE])
async def test_changes_always_need_a_token(tmp_path, path, body, door):
    """A change without a token, or with a wrong one, is 401, and nothing happens."""
    stage = Stage(tmp_path, door=door)
    token = AUTH["Authorization"]
    async with stage.client() as client:
        is_problem(await client.post(path, json=body), 401)
        wrong = ["Bearer", "Bearer ", token.replace("Bearer", "Basic"), token.partition(" ")[2]]
        for said in [*wrong, f"{token}x", token[:-1], "Bearer é".encode(), "Bearer " + "x" * 5000]:
            is_problem(await client.post(path, json=body, headers={"Authorization": said}), 401)
    assert stage.desk.changes == []
    stage.close()


async def test_token_is_created_with_its_join_string(stage):
    """A new token is shown once, as the join string a volunteer pastes, and never cached."""
    desk = stage.desk
    async with stage.client() as client:
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


async def test_changes_reach_the_service_with_actor_and_reason(stage):
    """Pausing and suspending hand on who asked and why, and answer with the new view."""
    desk = stage.desk
    async with stage.client() as client:
        paused = await client.post("/v1/runs/sums/pause", json={"reason": "disk"}, headers=AUTH)
        gone = await client.post(f"/v1/nodes/{PEER}/suspend", json={"reason": "forged"}, headers=AUTH)
    assert paused.json()["run"] == "sums"
    assert gone.json()["state"] == "suspended"
    assert desk.changes == [("pause_run", "sums", "operator", "disk"), ("suspend_node", PEER, "operator", "forged")]


@pytest.mark.parametrize("content", [b"", b"{}"])
@pytest.mark.parametrize("kind", [None, "application/json", "application/x-www-form-urlencoded"])
async def test_a_change_needs_no_body(stage, content, kind):
    """`curl -X POST`, with or without -d '': every default holds. Only what has no default must be said."""
    if content and kind != "application/json":
        return
    headers = AUTH if kind is None else AUTH | {"Content-Type": kind}
    desk = stage.desk
    async with stage.client() as client:
        for path in ("/v1/tokens", "/v1/runs/sums/pause"):
            assert (await client.post(path, content=content, headers=headers)).status_code in {200, 201}, path
        for verb in ("suspend", "restore"):
            is_problem(await client.post(f"/v1/nodes/{PEER}/{verb}", content=content, headers=headers), 422)
    assert desk.changes == [
        ("create_token", 1, 72 * 3600.0, "operator", "made over REST"),
        ("pause_run", "sums", "operator", "asked over REST"),
    ]


async def test_a_body_that_is_not_said_to_be_json_is_told_so(stage):
    """curl's -d alone sends a form."""
    headers = AUTH | {"Content-Type": "application/x-www-form-urlencoded"}
    async with stage.client() as client:
        answer = await client.post("/v1/runs/sums/pause", content=b'{"reason": "x"}', headers=headers)
    assert "send it with the header Content-Type: application/json" in is_problem(answer, 422)


async def test_what_cannot_be_done_says_why(stage):
    """Unknown names are 404, a change the state forbids 409, a bug 500 without its traceback."""
    desk = stage.desk
    async with stage.client() as client:
        assert "no run" in is_problem(await client.get("/v1/runs/none"), 404)
        assert "no node" in is_problem(await client.get(f"/v1/nodes/{STRANGER}"), 404)
        is_problem(await client.post("/v1/runs/none/pause", json={}, headers=AUTH), 404)
        is_problem(await client.post(f"/v1/nodes/{STRANGER}/suspend", json={"reason": "x"}, headers=AUTH), 404)
        detail = is_problem(await client.post("/v1/runs/sums/resume", json={}, headers=AUTH), 409)
        assert detail == "the run is running, not paused"
        desk.fault = ZeroDivisionError()
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
async def test_bad_bodies_are_refused(stage, path, body):
    """A body or a name outside the schema is 422 naming the field, and changes nothing."""
    desk = stage.desk
    async with stage.client() as client:
        is_problem(await client.post(path, json=body, headers=AUTH), 422)
    assert desk.changes == []


async def test_body_is_bounded(stage):
    """A body above the bound is 413, whether its length is announced or not."""
    large = b'{"reason": "' + b"x" * BODY_BYTES_MAX + b'"}'

    async def pieces():
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    desk = stage.desk
    async with stage.client() as client:
        is_problem(await client.post("/v1/tokens", content=large, headers=AUTH), 413)
        is_problem(await client.post("/v1/tokens", content=pieces(), headers=AUTH), 413)
        is_problem(await client.post("/v1/tokens", content=b"x", headers=AUTH | {"Content-Length": "-1"}), 413)
    assert desk.changes == []


@pytest.mark.parametrize("host", ["evil.example:8080", "", "127.0.0.1.evil.example"])
async def test_other_names_for_loopback_are_refused(stage, host):
    """A web page whose name points at 127.0.0.1 cannot read the pool."""
    async with stage.client() as client:
        is_problem(await client.get("/v1/pool", headers={"Host": host}), 403)


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:8080", "LOCALHOST"])
async def test_loopback_has_several_names(stage, host):
    """Every usual way to write loopback is answered."""
    async with stage.client() as client:
        assert (await client.get("/v1/pool", headers={"Host": host})).status_code == 200


async def test_health_tells_trouble(stage):
    """While the coordinator refuses requests, healthz says why."""
    desk = stage.desk
    async with stage.client() as client:
        assert (await client.get("/healthz")).json() == {"status": "ok", "trouble": ""}
        desk.trouble = "the disk is full"
        assert (await client.get("/healthz")).json() == {"status": "trouble", "trouble": "the disk is full"}


async def test_metrics_parse_and_leave_out_what_is_not_measured(stage):
    """The scrape is valid, carries the numbers of the views, and shows no 0 for what nobody measured."""
    async with stage.client() as client:
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


async def test_openapi_without_pages_from_elsewhere(stage):
    """The schema lists every path; there are no documentation pages that load scripts from a CDN."""
    async with stage.client() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        for page in ("/docs", "/redoc"):
            is_problem(await client.get(page), 404)
    assert "/v1/nodes/{peer}/suspend" in paths
    assert paths["/v1/nodes/{peer}/suspend"]["post"]["security"] == [{"token": []}]
    assert "security" not in paths["/v1/pool"]["get"]
    assert "Problem" in json.dumps(paths["/v1/tokens"]["post"]["responses"]["401"])


async def test_while_the_database_is_away_clients_are_told_to_come_again(stage):
    """503 with a time, not that the request is wrong: the same one will do."""
    stage.desk.fault = LedgerUnavailable("its database does not answer")
    async with stage.client(**AUTH) as client:
        answer = await client.post("/v1/runs/sums/stop")
    assert "its database does not answer" in is_problem(answer, 503)
    assert answer.headers["retry-after"] == "5"


async def test_a_run_that_waits_is_started_and_one_that_works_stays_as_it_is(stage):
    """Start is for the state it brings about: said twice it does no harm, and is on record once."""
    stage.desk.state = "paused"
    async with stage.client(**AUTH) as client:
        for _ in range(2):
            assert (await client.post("/v1/runs/sums/start", json={"reason": "go"})).json()["state"] == "running"
    assert stage.desk.changes == [("resume_run", "sums", "operator", "go")]


async def test_every_answer_forbids_browsers_what_nobody_needs(stage):
    """Scripts and frames of elsewhere, guesses at types, referrers, caches; errors have the headers too."""
    async with stage.client() as client:
        for path in ("/v1/pool", "/nowhere", "/v1/access"):
            headers = (await client.get(path)).headers
            assert headers["content-security-policy"].startswith("default-src 'self';")
            assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
            assert (headers["referrer-policy"], headers["cache-control"]) == ("no-referrer", "no-store")
            assert "strict-transport-security" not in headers


async def test_under_tls_browsers_are_told_to_stay_with_it(tmp_path):
    """HSTS, which over plain HTTP would mean nothing."""
    stage = Stage(tmp_path, door=Door(open_reads=False, tls=True))
    async with stage.client("https://pool.example.org") as client:
        assert (await client.get("/v1/pool")).headers["strict-transport-security"] == "max-age=31536000"
    stage.close()


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8081", "http://127.0.0.1"])
async def test_pages_of_another_origin_change_nothing(stage, origin):
    """Not even with a token; our own page may."""
    async with stage.client(**AUTH) as client:
        is_problem(await client.post("/v1/runs/sums/pause", headers={"Origin": origin}), 403)
        assert stage.desk.changes == []
        assert (await client.post("/v1/runs/sums/pause", headers={"Origin": BASE})).status_code == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
async def test_a_proxy_that_was_not_announced_is_refused(stage, header):
    """Or all the world would read what is open to this machine's own processes."""
    async with stage.client(**AUTH) as client:
        detail = is_problem(await client.get("/v1/pool", headers={header: "192.0.2.7"}), 403)
    assert "rest.behind_proxy" in detail


async def test_only_the_announced_proxy_may_ask_and_it_says_for_whom(tmp_path):
    """Whoever goes round it is refused; limits are those of the clients behind it, by the address that it saw."""
    limits = Limits(reads=Rate(2, 0.01))
    stage = Stage(tmp_path, door=Door(open_reads=False, tls=True, proxy="10.0.0.5"), limits=limits)
    async with stage.client(address="10.0.0.6", **AUTH) as round_it, stage.client(address="10.0.0.5") as proxy:
        is_problem(await round_it.get("/v1/pool"), 403)
        is_problem(await proxy.get("/v1/pool"), 401)
        said = [{"X-Forwarded-For": f"198.51.100.9, 203.0.113.{client}"} for client in (1, 1, 1, 2)]
        answers = [(await proxy.get("/v1/pool", headers=each)).status_code for each in said]
    assert answers == [401, 401, 429, 401]
    stage.close()


async def test_a_client_that_asks_too_often_is_told_when_to_come_again(tmp_path):
    """Reads and changes apart; by token, else by address, and an IPv6 line is one client."""
    limits = Limits(reads=Rate(3, 0.5), changes=Rate(2, 0.5))
    stage = Stage(tmp_path, limits=limits)
    viewer = stage.token("viewer")

    async def statuses(client, count, **headers):
        return [(await client.get("/v1/pool", headers=headers)).status_code for _ in range(count)]

    async with stage.client(address="2001:db8::1") as one, stage.client(address="2001:db8::2") as same_line:
        assert await statuses(one, 2) + await statuses(same_line, 2) == [200, 200, 200, 429]
        answer = await one.get("/v1/pool")
        assert answer.headers["retry-after"] == "2"
        assert await statuses(one, 1, **AUTH) == [200], "a token has its own"
        assert await statuses(one, 4, **viewer) == [200, 200, 200, 429], "each its own"
        stage.now += 2.0
        assert await statuses(one, 2) == [200, 429]
        changes = [(await one.post("/v1/runs/sums/pause", headers=AUTH)).status_code for _ in range(3)]
        assert changes == [200, 200, 429]
        assert len(stage.desk.changes) == 2
    stage.close()


async def test_tokens_that_are_none_are_tried_only_so_often(tmp_path):
    """From one address; a good token passes all the while."""
    stage = Stage(tmp_path, limits=Limits(failures=Rate(3, 0.1)))
    async with stage.client() as client:
        tried = [
            (await client.get("/v1/pool", headers={"Authorization": f"Bearer {number}"})).status_code
            for number in range(5)
        ]
        assert tried == [401, 401, 401, 429, 429]
        assert (await client.get("/v1/pool", headers=AUTH)).status_code == 200
    stage.close()
