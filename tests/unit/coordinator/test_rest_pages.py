"""Lists over REST: pages that stay as they are while rows are added, and the audit log as it grows."""

from __future__ import annotations

import hashlib
import json

import pytest
import trio
import trio.testing
from rest_stage import PEER, STRANGER, Stage, is_problem

from echo2.coordinator import routes_events
from echo2.coordinator.event_feed import (
    HEARTBEAT_SECONDS,
    PAGE,
    STREAM_SECONDS,
    WATCHERS_MAX,
    WATCHERS_OF_CLIENT_MAX,
    EventFeed,
)
from echo2.coordinator.ledger import LedgerUnavailable
from echo2.coordinator.rest_gate import Door, Who
from echo2.p2p.errors import Refused


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.close()


async def pages(client, path, between=lambda: None):
    """Every row, following the links; `between` two pages something happens."""
    rows, count = [], 0
    while path:
        answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        rows += answer.json()
        path = answer.links.get("next", {}).get("url")
        count += 1
        between()
    return rows, count


async def test_nodes_are_paged_while_nodes_are_added(stage):
    """Each once, in the order of admission; those that came in between, behind the others."""
    stage.desk.nodes = 7

    def one_more():
        stage.desk.nodes = min(stage.desk.nodes + 1, 10)

    async with stage.client() as client:
        rows, count = await pages(client, "/v1/nodes?limit=3", one_more)
        assert [row["name"] for row in rows] == [f"n{number}" for number in range(9)]
        assert count == 3
        rows, count = await pages(client, "/v1/nodes?limit=10")
        assert (len(rows), count) == (10, 1)


async def test_nodes_are_filtered(stage):
    """By state and health; the link keeps the filter."""
    stage.desk.nodes = 9
    stage.desk.suspend_node(PEER, actor="a", reason="r")
    async with stage.client() as client:
        rows, count = await pages(client, "/v1/nodes?limit=3&state=active&health=healthy")
        assert [row["name"] for row in rows] == [f"n{number}" for number in range(1, 9)]
        assert count == 3
        assert [row["name"] for row in (await client.get("/v1/nodes?state=suspended")).json()] == ["n0"]
        assert (await client.get("/v1/nodes?health=dead")).json() == []
        is_problem(await client.get("/v1/nodes?state=asleep"), 422)
        wrong = await client.get("/v1/nodes?stat=suspended")
        is_problem(wrong, 422)  # else a filter with a typing error answers with every node
        assert "no parameter 'stat' here; did you mean 'state'?" in wrong.json()["detail"]
        assert (await client.get("/v1/runs?limit=5")).status_code == 200  # asked like any list, though never long
        is_problem(await client.get(f"/v1/nodes?after={2**70}"), 422)


async def test_the_audit_log_is_paged_while_it_grows(stage):
    """From the newest back: what is added meanwhile moves nothing."""
    for number in range(8):
        stage.desk.add_event(f"{number}")
    known = [event.id for event in reversed(stage.desk.events)]
    async with stage.client() as client:
        rows, _ = await pages(client, "/v1/events?limit=2", stage.desk.add_event)
        assert [row["id"] for row in rows] == known
        is_problem(await client.get("/v1/events?limit=0"), 422)


async def test_a_runs_steps_are_paged(stage):
    """By step; those reported meanwhile come at the end."""
    stage.desk.steps = 25

    def one_more():
        stage.desk.steps = min(stage.desk.steps + 1, 27)

    async with stage.client() as client:
        rows, _ = await pages(client, "/v1/runs/sums/metrics?limit=10", one_more)
        assert [row["step"] for row in rows] == list(range(27))
        assert [row["step"] for row in (await client.get("/v1/runs/sums/metrics?after=24")).json()] == [25, 26]
        is_problem(await client.get("/v1/runs/none/metrics"), 404)


async def test_the_chain_is_read_page_by_page_and_verified(tmp_path, database_url):
    """All of it, one node's part, what it comes to, and whether it is as it was written."""
    stage = Stage(tmp_path, url=database_url)
    stage.post_credits(*range(1, 8))
    stage.post_credits(-100, peer=STRANGER)
    async with stage.client() as client:
        rows, count = await pages(client, "/v1/ledger/postings?limit=3", lambda: None)
        assert [(row["id"], row["amount_micros"]) for row in rows] == [*((n, n) for n in range(1, 8)), (8, -100)]
        assert rows[1]["previous"] == rows[0]["hash"]
        assert count == 3
        own, _ = await pages(client, f"/v1/ledger/postings?limit=1&peer={STRANGER}")
        assert [row["id"] for row in own] == [8]
        totals, count = await pages(client, "/v1/ledger/balances?limit=1")
        assert {row["peer"]: row["amount_micros"] for row in totals} == {PEER: 28, STRANGER: -100}
        assert (await client.get(f"/v1/ledger/balances?peer={PEER}")).json()[0]["postings"] == 7
        verified = (await client.get("/v1/ledger/verify")).json()
        assert verified == {"intact": True, "fault": "", "postings": 8, "head": rows[-1]["hash"]}
        with stage.ledger.transaction() as connection:
            connection.exec_driver_sql("UPDATE postings SET amount_micros = 5000 WHERE id = 3")
        broken = (await client.get("/v1/ledger/verify")).json()
        assert not broken["intact"]
        assert "posting 3" in broken["fault"]
    stage.close()


async def test_a_ledger_that_cannot_be_read_is_a_matter_of_time(stage, tmp_path):
    """503, as for every database that is away."""
    (tmp_path / "ledger.sqlite3").rename(tmp_path / "elsewhere")
    async with stage.client() as client:
        answer = await client.get("/v1/ledger/verify")
    is_problem(answer, 503)
    assert "retry-after" in answer.headers


# the stream


def lines_of(text):
    """(id, event) of each event in a stream's text."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            assert fields["event"] == "audit"
            found.append((int(fields["id"]), json.loads(fields["data"])))
    return found


async def test_a_stream_goes_on_where_it_broke_off(autojump_clock, tmp_path):
    """By Last-Event-ID, before `after`: every line behind it, none twice, however many; then the new ones."""
    stage = Stage(tmp_path, stream_seconds=5.0)
    for number in range(2 * PAGE + 5):
        stage.desk.add_event(f"{number}")
    ids = [event.id for event in stage.desk.events]
    async with stage.client() as client, trio.open_nursery() as nursery:
        nursery.start_soon(stage.rooms.feed.run)

        async def grow():
            await trio.sleep(2)
            stage.desk.add_event("later")

        for headers, query, begin in (
            ({"Last-Event-ID": str(ids[2])}, "?after=1", 3),
            ({}, f"?after={ids[100]}", 101),
            ({}, "?after=0", 0),
            ({}, "", -1),
        ):
            nursery.start_soon(grow)
            answer = await client.get(f"/v1/events/stream{query}", headers=headers)
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.text.startswith("retry: 2000\n\n")
            found = lines_of(answer.text)
            ids.append(stage.desk.newest_event())
            assert [number for number, _ in found] == ids[begin:]
            assert found[-1][1]["reason"] == "later"
        is_problem(await client.get("/v1/events/stream", headers={"Last-Event-ID": "x"}), 422)
        nursery.cancel_scope.cancel()
    stage.close()


async def test_a_silent_stream_shows_that_it_lives_and_ends(autojump_clock, stage):
    """A comment each five seconds, and after a minute and a half the end: the browser comes again by itself."""
    feed = EventFeed(stage.desk)
    begun = trio.current_time()
    seen = [page async for page in feed.events(None)]
    assert trio.current_time() - begun == STREAM_SECONDS
    assert seen == [[]] * int(STREAM_SECONDS / HEARTBEAT_SECONDS)


async def test_a_ledger_that_is_away_ends_no_stream(autojump_clock, stage, monkeypatch):
    """What happened meanwhile comes when it is back."""
    feed, broken = EventFeed(stage.desk), LedgerUnavailable("away")
    behind, newest = stage.desk.events_behind, stage.desk.newest_event
    stage.desk.add_event("before")

    def away(*_arguments, **_named):
        raise broken

    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        with feed.watching("c"):
            events = feed.events(newest())
            monkeypatch.setattr(stage.desk, "events_behind", away)
            monkeypatch.setattr(stage.desk, "newest_event", away)
            assert await anext(events) == []
            monkeypatch.setattr(stage.desk, "events_behind", behind)
            monkeypatch.setattr(stage.desk, "newest_event", newest)
            stage.desk.add_event("meanwhile")
            assert [event.reason for event in await anext(events)] == ["meanwhile"]
            await events.aclose()
        nursery.cancel_scope.cancel()


def test_places_among_the_watchers_are_bounded_and_given_back(stage):
    """Of one client and of all."""
    feed = stage.rooms.feed
    mine = [feed.watching("me") for _ in range(WATCHERS_OF_CLIENT_MAX)]
    for place in mine:
        place.__enter__()
    with pytest.raises(Refused, match="of one client"), feed.watching("me"):
        pass
    others = [feed.watching(f"c{number}") for number in range(WATCHERS_MAX - len(mine))]
    for place in others:
        place.__enter__()
    for place in mine:
        place.__exit__(None, None, None)
    more = [feed.watching(f"d{number}") for number in range(len(mine))]
    for place in more:
        place.__enter__()
    with pytest.raises(Refused, match="streams are open"), feed.watching("one more"):
        pass
    for place in (*others, *more):
        place.__exit__(None, None, None)
    assert len(feed._watchers) == 0


def test_in_a_full_house_whoever_watches_most_gives_up_a_place(stage):
    """One token at many addresses cannot keep all others from watching: its oldest stream ends for each who comes."""
    feed = stage.rooms.feed
    crowd = [feed.watching(f"address {number}", "token viewer") for number in range(WATCHERS_MAX)]
    watchers = [place.__enter__() for place in crowd]
    with feed.watching("address 1", "token operator"), feed.watching("address 1", "token operator"):
        assert [watcher.over for watcher in watchers] == [True, True] + [False] * (WATCHERS_MAX - 2)
        with pytest.raises(Refused, match="streams are open"), feed.watching("address 1", "token viewer"):
            pass
        assert len(feed._watchers) == WATCHERS_MAX
    for place in crowd:
        place.__exit__(None, None, None)
    assert len(feed._watchers) == 0


async def test_a_stream_that_gave_up_its_place_ends(stage):
    """In order and at once, long before its time; a browser comes again by itself."""
    feed = EventFeed(stage.desk)
    with feed.watching("c") as watcher:
        events = feed.events(0, lambda: not watcher.over)
        assert len(await anext(events)) == 1
        async with trio.open_nursery() as nursery:

            async def rest():
                assert [page async for page in events] == []

            nursery.start_soon(rest)
            await trio.testing.wait_all_tasks_blocked()
            watcher.over = True
            feed._ring()


@pytest.mark.parametrize("how", ["revoked", "expired", "logged out", "session of a revoked token"])
async def test_a_stream_ends_with_the_right_to_watch(tmp_path, how):
    """At its next line or sign of life: a token's that counts no more, a session's that was closed."""
    stage = Stage(tmp_path, door=Door(open_reads=False), stream_seconds=60.0)
    token = stage.token("viewer", expires_seconds=60)
    async with stage.client() as client:
        headers = token
        if "ed out" in how or "session" in how:
            login = await client.post("/v1/session", headers=token)
            cookie = login.cookies["echo2-session"]
            headers = {"Cookie": f"echo2-session={cookie}"}
        digest = hashlib.sha256(token["Authorization"].partition(" ")[2].encode()).digest()
        who = Who("a-viewer", "viewer", digest, cookie if headers is not token else "")
        assert routes_events._may_still(stage.rooms, who)
        if "revoked" in how:
            stage.access.revoke("a-viewer", actor="test", reason="left")
        elif how == "expired":
            stage.wall += 60
        else:
            csrf = {"X-CSRF-Token": login.json()["csrf"]}
            assert (await client.delete("/v1/session", headers=headers | csrf)).status_code == 204
        assert not routes_events._may_still(stage.rooms, who)
    feed, watched = stage.rooms.feed, []
    with feed.watching("c"):
        watched = [page async for page in feed.events(0, lambda: routes_events._may_still(stage.rooms, who))]
    assert watched == []
    stage.close()


async def test_whoever_finds_no_place_is_told_before_the_stream_begins(stage):
    """503 with a time; a stream that ended gave its place back."""
    async with stage.client() as client:
        for _ in range(WATCHERS_OF_CLIENT_MAX + 1):
            assert (await client.get("/v1/events/stream")).status_code == 200
        places = [stage.rooms.feed.watching("address 127.0.0.1") for _ in range(WATCHERS_OF_CLIENT_MAX)]
        for place in places:
            place.__enter__()
        answer = await client.get("/v1/events/stream")
    is_problem(answer, 503)
    assert answer.headers["retry-after"] == "10"
