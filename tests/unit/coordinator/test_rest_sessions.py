"""Sessions of browsers: how they begin, what a change by cookie needs, and how they end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rest_stage import AUTH, BASE, TOKEN, Stage, is_problem

from echo2.coordinator.rest_gate import Door
from echo2.coordinator.rest_limits import Buckets, Limits, Rate, client_of
from echo2.coordinator.rest_sessions import (
    ABSOLUTE_SECONDS,
    IDLE_SECONDS,
    SESSIONS_MAX,
    SESSIONS_OF_TOKEN_MAX,
    Sessions,
    csrf_holds,
    csrf_of,
)

NOBODY = {"name": "", "role": None, "csrf": ""}


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("how", [{"json": {"token": TOKEN}}, {"headers": AUTH}])
async def test_a_page_logs_in_changes_something_and_logs_out(stage, how):
    """The token once, in body or header; then the cookie for reading, and with the CSRF token for changes."""
    async with stage.client() as client:
        login = await client.post("/v1/session", **how)
        assert login.status_code == 201
        said = login.json()
        assert (said["name"], said["role"]) == ("operator", "operator")
        cookie = login.headers["set-cookie"]
        assert TOKEN not in cookie
        for part in ("HttpOnly", "Path=/", "SameSite=strict"):
            assert part in cookie
        assert "Secure" not in cookie, "plain HTTP on loopback"
        assert (await client.get("/v1/session")).json() == said
        assert (await client.get("/v1/tokens")).status_code == 200
        csrf = {"X-CSRF-Token": said["csrf"], "Origin": BASE}
        assert (await client.post("/v1/runs/sums/pause", json={}, headers=csrf)).status_code == 200
        assert (await client.delete("/v1/session", headers=csrf)).status_code == 204
        assert "echo2-session" not in client.cookies
        client.cookies.set("echo2-session", cookie.partition("=")[2].partition(";")[0])
        assert (await client.get("/v1/session")).json() == NOBODY
    assert stage.desk.changes == [("pause_run", "sums", "operator", "asked over REST")]


@pytest.mark.parametrize("said", [None, "", "0" * 64, csrf_of("another cookie"), "é"])
async def test_a_change_by_cookie_needs_the_csrf_token(stage, said):
    """Which only our own page can have read; a token in the header needs none, cookie or not."""
    headers = {} if said is None else {"X-CSRF-Token": said.encode()}
    async with stage.client() as client:
        await client.post("/v1/session", json={"token": TOKEN})
        is_problem(await client.post("/v1/runs/sums/pause", json={}, headers=headers), 403)
        is_problem(await client.delete("/v1/session", headers=headers), 403)
        assert stage.desk.changes == []
        assert (await client.post("/v1/runs/sums/pause", json={}, headers=headers | AUTH)).status_code == 200
        assert (await client.post("/v1/session", json={"token": TOKEN})).status_code == 201, "logging in anew"


async def test_under_tls_the_cookie_is_of_this_host_alone(tmp_path):
    """Secure, with the prefix that browsers take from nobody else."""
    stage = Stage(tmp_path, door=Door(open_reads=False, tls=True))
    async with stage.client("https://pool.example.org") as client:
        login = await client.post("/v1/session", json={"token": TOKEN})
        assert login.headers["set-cookie"].startswith("__Host-echo2-session=")
        assert "Secure" in login.headers["set-cookie"]
        assert (await client.get("/v1/pool")).status_code == 200
    stage.close()


async def test_a_session_has_its_tokens_role_and_ends_with_it(stage):
    """A viewer's session changes nothing; a token that is revoked or expires takes its sessions along."""
    ends = {
        "a-viewer": lambda: stage.access.revoke("a-viewer", actor="test", reason="left"),
        "a-researcher": lambda: setattr(stage, "wall", stage.wall + 60),
    }
    for role in ("viewer", "researcher"):
        token = stage.token(role, expires_seconds=60)
        async with stage.client() as client:
            csrf = {"X-CSRF-Token": (await client.post("/v1/session", headers=token)).json()["csrf"]}
            is_problem(await client.post("/v1/tokens", json={}, headers=csrf), 403)
            assert (await client.get("/v1/session")).json()["role"] == role
            ends[f"a-{role}"]()
            assert (await client.get("/v1/session")).json() == NOBODY
            is_problem(await client.post("/v1/runs/sums/pause", json={}, headers=csrf), 401)


@pytest.mark.parametrize(("step", "alive"), [(IDLE_SECONDS - 1, ABSOLUTE_SECONDS), (IDLE_SECONDS, 0)])
async def test_a_session_ends_unused_and_after_a_day(stage, step, alive):
    """Used again and again it lives for the day, and not a moment longer."""
    async with stage.client() as client:
        await client.post("/v1/session", json={"token": TOKEN})
        begun = stage.now
        while True:
            stage.now += step
            answer = await client.get("/v1/session")
            if answer.json() == NOBODY:
                break
        assert stage.now - begun >= alive
        assert stage.now - begun - step < max(alive, 1)


async def test_log_ins_are_limited(tmp_path):
    """By address, right or wrong ones."""
    stage = Stage(tmp_path, limits=Limits(logins=Rate(3, 0.1)))
    async with stage.client() as client, stage.client(address="192.0.2.1") as other:
        tried = [(await client.post("/v1/session", json={"token": f"{n}"})).status_code for n in range(3)]
        late = await client.post("/v1/session", json={"token": TOKEN})
        assert tried == [401, 401, 401]
        assert late.headers["retry-after"] == "10"
        is_problem(late, 429)
        assert (await other.post("/v1/session", json={"token": TOKEN})).status_code == 201
    stage.close()


def test_the_sessions_kept_are_bounded():
    """Of one token and of all: the longest unused goes first."""
    sessions = Sessions(random.Random(1).randbytes)
    own = [sessions.open(b"a", 0.0) for _ in range(SESSIONS_OF_TOKEN_MAX)]
    assert sessions.find(own[0], 1.0)
    newest = sessions.open(b"a", 2.0)
    assert sessions.find(own[1], 2.0) is None
    assert sessions.find(own[0], 2.0)
    assert sessions.find(newest, 2.0)
    for number in range(SESSIONS_MAX):
        sessions.open(number.to_bytes(2), 3.0)
    assert len(sessions._open) == SESSIONS_MAX
    assert sessions.find(newest, 3.0) is None


def test_the_server_keeps_no_cookie():
    """Whoever reads its memory's table finds hashes only."""
    sessions = Sessions(random.Random(1).randbytes)
    cookie = sessions.open(b"a", 0.0)
    assert len(bytes.fromhex(cookie)) == 32
    assert cookie.encode() not in sessions._open
    assert csrf_holds(cookie, csrf_of(cookie))
    assert not csrf_holds(cookie, csrf_of(cookie + "x"))


@given(st.lists(st.floats(0, 5), max_size=60), st.integers(1, 8), st.floats(0.1, 10))
def test_no_more_than_a_burst_and_the_rate_pass_in_any_time(gaps, burst, per_second):
    """Between any two requests that pass, at most burst + rate x time others did; and a wait that is kept is enough."""
    buckets, now, passed = Buckets(Rate(burst, per_second)), 100.0, []
    for gap in gaps:
        now += gap
        wait = buckets.take("c", now)
        if wait:
            assert buckets.take("c", now) > 0, "asking again in vain costs nothing and gains nothing"
            now += wait + 1e-6
            assert buckets.take("c", now) == 0
        passed.append(now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + per_second * (passed[last] - passed[first]) + 1e-3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("", "unix", False),
    ],
)
def test_what_counts_as_one_client(one, other, same):
    """An IPv6 line, whose addresses cost nothing, is one; IPv4 is the same however it is written."""
    assert (client_of(one) == client_of(other)) is same
