"""Who may do what over REST: every route, every role, every way not to be let in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rest_stage import AUTH, PEER, Stage, is_problem

from echo2.coordinator.api import ROUTERS
from echo2.coordinator.rest_gate import Door
from echo2.coordinator.rest_guard import GuardedRoute, make_router
from echo2.coordinator.rest_roles import NEEDS, ROLES, SAFE_METHODS, refusal

PATHS = {"{peer}": PEER, "{run}": "sums", "{token}": "00112233aabb", "{name}": "nobody"}
BODIES = {
    "/v1/tokens": {"uses": 1},
    "/v1/access": {"name": "new", "role": "viewer"},
    "/v1/session": {},
    "/v1/runs/validate": {"run": {}},
    "/v1/runs/estimate": {"run": {}},
}
STRANGERS = ("nobody", "unknown", "revoked", "expired")


def path_of(template):
    for part, value in PATHS.items():
        template = template.replace(part, value)
    return template


def test_every_route_is_in_the_table_and_nothing_else(tmp_path):
    """The table is the whole truth: no route without a line, no line without a route."""
    stage = Stage(tmp_path)
    routes = [route for make in ROUTERS for route in make(stage.rooms).routes]
    assert all(isinstance(route, GuardedRoute) for route in routes)
    assert {(method, route.path) for route in routes for method in route.methods} == set(NEEDS)
    stage.close()


def test_a_route_that_is_not_in_the_table_cannot_be_made():
    """Forgetting it is found when the coordinator starts, not when somebody walks in."""
    router = make_router("new")

    async def everything() -> str:
        return "secret"

    with pytest.raises(KeyError, match="everything"):
        router.add_api_route("/v1/everything", everything)


def test_the_table_says_what_the_roles_mean():
    """Viewers change nothing, researchers runs alone, and lists of tokens are for operators."""
    for (method, path), needs in NEEDS.items():
        change = method not in SAFE_METHODS
        if path == "/v1/session":
            assert needs in {"anyone", "viewer"}
        elif change:
            assert needs == ("researcher" if path.startswith("/v1/runs/") else "operator"), path
        else:
            assert needs == ("operator" if path in {"/v1/tokens", "/v1/access"} else "reader"), path


def test_each_role_may_do_what_those_before_it_may():
    """Worked by hand: 401 for strangers, 403 for too little, None for enough."""
    for needs, least in (("viewer", 0), ("researcher", 1), ("operator", 2)):
        assert refusal(needs, None, open_reads=True) == 401
        for place, role in enumerate(ROLES):
            assert refusal(needs, role, open_reads=True) == (None if place >= least else 403)
    assert [refusal("reader", role, open_reads=False) for role in (None, *ROLES)] == [401, None, None, None]
    assert refusal("reader", None, open_reads=True) is None
    assert refusal("anyone", None, open_reads=False) is None


@pytest.fixture
def crowd(tmp_path):
    """Someone of each role, and of each kind of stranger."""
    stage = Stage(tmp_path, door=Door(open_reads=False))
    headers = {role: stage.token(role) for role in ROLES}
    headers |= {f"revoked {role}": stage.token(role, f"r-{role}") for role in ROLES}
    headers |= {f"expired {role}": stage.token(role, f"e-{role}", expires_seconds=60.0) for role in ROLES}
    for role in ROLES:
        stage.access.revoke(f"r-{role}", actor="test", reason="left")
    stage.wall += 60.0
    headers |= {"nobody": {}, "unknown": {"Authorization": "Bearer of-nobody"}}
    yield SimpleNamespace(stage=stage, headers=headers)
    stage.close()


async def test_every_route_with_every_role(crowd):
    """Off loopback: who may is let through to the route, who may not gets 401 or 403 and changes nothing."""
    desk = crowd.stage.desk
    async with crowd.stage.client() as client:
        for (method, path), needs in NEEDS.items():
            for who, headers in crowd.headers.items():
                role = who if who in ROLES else None
                wanted = refusal(needs, role, open_reads=False)
                if needs == "anyone" and role is None and (method, who) != ("GET", "nobody"):
                    wanted = 401  # the way in is open to all, and nobody comes through it without a token
                elif method == "DELETE":
                    wanted = wanted or 204
                before, known = list(desk.changes), len(crowd.stage.access.rows())
                body = BODIES.get(path, {"reason": "x"})
                send = None if method in SAFE_METHODS | {"DELETE"} else body
                answer = await client.request(method, path_of(path), json=send, headers=headers)
                client.cookies.clear()
                if wanted is None:
                    assert answer.status_code in {200, 201, 404, 409, 422}, (method, path, who, answer.text)
                    continue
                assert answer.status_code == wanted, (method, path, who, answer.text)
                assert (desk.changes, len(crowd.stage.access.rows())) == (before, known), (method, path, who)
                if wanted != 204:
                    is_problem(answer, wanted)


async def test_on_loopback_reading_is_open_and_nothing_else(tmp_path):
    """Without a token: every reader's route is answered; every other one is 401."""
    stage = Stage(tmp_path)
    async with stage.client() as client:
        for (method, path), needs in NEEDS.items():
            answer = await client.request(method, path_of(path), json=None if method == "GET" else {"reason": "x"})
            is_open = needs == "reader" or (needs == "anyone" and method == "GET")
            assert (answer.status_code in {200, 404}) == is_open, (method, path, answer.text)
            assert answer.status_code in {200, 401} or needs == "anyone", (method, path, answer.text)
    assert stage.desk.changes == []
    stage.close()


async def test_a_refusal_says_what_would_do(crowd):
    """The role that is needed and the one there is; of a token, whether it was revoked or has expired."""
    async with crowd.stage.client() as client:
        stop = await client.post("/v1/runs/sums/stop", json={}, headers=crowd.headers["viewer"])
        assert is_problem(stop, 403) == "this needs the role researcher; a-viewer is viewer"
        for who, said in (
            ("revoked viewer", "was revoked"),
            ("expired viewer", "has expired"),
            ("unknown", "not known"),
        ):
            assert said in is_problem(await client.get("/v1/pool", headers=crowd.headers[who]), 401)


async def test_the_audit_log_names_the_token(crowd):
    """Its name, not its role: two operators are told apart."""
    stage = crowd.stage
    ann = stage.token("operator", "ann")
    async with stage.client() as client:
        for headers in (ann, AUTH):
            await client.post(f"/v1/nodes/{PEER}/suspend", json={"reason": "forged"}, headers=headers)
            await client.post("/v1/runs/sums/pause", json={"reason": "lunch"}, headers=headers)
    assert [change[2] for change in stage.desk.changes] == ["ann", "ann", "operator", "operator"]
