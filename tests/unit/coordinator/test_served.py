"""Requests have an id in the log, are counted by outcome, and leases are told of by name."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
import trio

from echo2.coordinator.measures import Measures
from echo2.coordinator.served import UNMATCHED, ServedRest
from echo2.p2p.errors import Refused
from echo2.p2p.log_lines import JsonLines, short

pytestmark = pytest.mark.slow_on_postgresql


@pytest.fixture
def told():
    """Lines of the whole of echo2, parsed."""
    lines = []

    class Keeper(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(self.format(record)))

    handler, log = Keeper(), logging.getLogger("echo2")
    handler.setFormatter(JsonLines("echo2-coordinator"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield lines
    log.removeHandler(handler)
    log.setLevel(before)


class Route:
    path = "/v1/runs/{run}"


def rest(measures, status=200, route=None, error=None):
    async def app(scope, _receive, send):
        logging.getLogger("echo2.coordinator.test").info("inside")
        if route is not None:
            scope["route"] = route
        if error is not None:
            raise error
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b""})

    served = ServedRest(app, measures, iter([1.0, 1.2] * 9).__next__)
    transport = httpx.ASGITransport(served, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_a_request_id_of_the_client_is_kept_and_answered(told):
    """It is on every line that is logged inside, and what else the answer has stays."""
    measures = Measures()
    async with rest(measures, 404, Route()) as client:
        answer = await client.post("/v1/runs/x", headers={"X-Request-ID": "from-proxy.1"})
    assert (answer.headers["x-request-id"], answer.headers["a"]) == ("from-proxy.1", "b")
    inside, line = told
    assert (inside["message"], inside["request"]) == ("inside", "from-proxy.1")
    assert (line["event"], line["request"], line["level"]) == ("rest_request", "from-proxy.1", "info")
    assert line["message"] == "POST /v1/runs/{run}: 404 in 0.200 s"
    histogram = measures.rest["/v1/runs/{run}", "4xx"]
    assert (histogram.count, histogram.sum) == (1, pytest.approx(0.2))


@pytest.mark.parametrize("asked", ["", "x" * 65, 'a", "level": "error', "a b", "<script>", "\u00e9"])
async def test_what_is_no_id_is_replaced(told, asked):
    """A made one goes into log and answer, and nothing of what was sent does."""
    async with rest(Measures()) as client:
        answer = await client.get("/", headers=[(b"x-request-id", asked.encode())])
    given = answer.headers["x-request-id"]
    assert len(given) == 12
    assert int(given, 16) >= 0
    assert {line["request"] for line in told} == {given}


async def test_a_defect_is_counted_as_one(told):
    """An application that raises before it answers has served an error."""
    measures = Measures()
    async with rest(measures, error=ZeroDivisionError()) as client:
        await client.get("/nowhere")
    assert list(measures.rest) == [(UNMATCHED, "5xx")]
    assert told[-1]["level"] == "info"


async def test_a_lease_is_followed_through_the_log(autojump_clock, world, tools, told):
    """Granted, returned, rejected, expired: each says its leases, the peer and the request that it happened in."""
    world.run_settings = {"lease_seconds": 30.0}
    async with (
        world.serving() as service,
        world.learner() as learner,
        world.node(10) as node,
        world.node(11) as stranger,
    ):
        await learner.hello()
        await learner.publish()
        await node.join()
        good, bad, lost = (await node.lease(3)).leases
        await node.submit(tools.answer(good), tools.answer(bad, digits=[9] * 9))
        for _ in range(4):
            await node.heartbeat(held=1)
            await trio.sleep(10)
        with pytest.raises(Refused):
            await stranger.hello("made up \n token")
        assert service.measures.wire["leases", "ok"] == 1

    def events(lease):
        found = [line for line in told if short(lease.lease_id) in line.get("leases", ())]
        assert all(line["peer"] == node.peer_id for line in found)
        return [line["event"] for line in found]

    assert events(good) == ["leases_granted", "leases_returned"]
    assert events(bad) == ["leases_granted", "leases_rejected"]
    assert events(lost) == ["leases_granted", "leases_expired"]
    by_event = {line["event"]: line for line in told if "event" in line}
    assert by_event["leases_granted"]["protocol"] == "leases"
    assert by_event["leases_returned"]["request"] == by_event["leases_rejected"]["request"]
    assert by_event["leases_granted"]["request"] != by_event["leases_returned"]["request"]
    assert by_event["request_refused"]["protocol"] == "hello"


async def test_a_lease_of_nobody_is_told_of(autojump_clock, world, tools, told):
    """Work for a lease that was never given says whose it is, and changes no count of leases."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.join()
        (lease,) = (await node.lease(1)).leases
        forged = tools.answer(lease).model_copy(update={"lease_id": b"\x07" * 16})
        await node.submit(forged)
        assert [line["leases"] for line in told if line.get("event") == "leases_refused"] == [["07" * 6]]
        assert not service.measures.leases_ended["rejected"]
