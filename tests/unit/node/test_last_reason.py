"""A node that is not in the pool shows the real reason, in status and log, also once nobody is there to say it."""

from __future__ import annotations

import logging

import pytest
import trio

from echo2.node import membership
from echo2.p2p.errors import AnotherPeer, ConfigurationError, Refused

REASON = "16384 live nodes are in this pool, which is as many as it takes"


async def test_what_the_coordinator_said_last_stays_on_show_while_it_is_unreachable(autojump_clock, pool, caplog):
    """A peer that closes the door tells nothing; what it said before it did is why."""
    caplog.set_level(logging.WARNING)
    pool.hello_refusal = Refused("pool_full", REASON, 60.0)
    async with pool.node() as service:
        await trio.sleep(10)
        assert REASON in service.status.last_error
        await pool.kill_coordinator()
        await trio.sleep(300)
        shown = service.status.last_error
        assert "refused" in shown
        assert f"it said last: {REASON}" in shown
        said = [record.getMessage() for record in caplog.records if "not in the pool" in record.getMessage()]
        assert [REASON in line for line in said] == [True, True]
        pool.hello_refusal = None
        await pool.start_coordinator()
        await trio.sleep(120)
        assert service.situation.facts.joined
        await pool.kill_coordinator()
        await trio.sleep(120)
        assert "it said last" not in service.status.last_error


async def test_a_log_has_one_line_for_a_reason_however_long_it_lasts(autojump_clock, pool, caplog):
    """A night without a coordinator is no flood of lines, whatever numbers the reason has in it."""
    caplog.set_level(logging.WARNING)
    async with pool.node() as service:
        await trio.sleep(10)
        await pool.kill_coordinator()
        await trio.sleep(3600)
        assert service.status.last_error
        said = [record.getMessage() for record in caplog.records if record.name == "echo2.node.membership"]
        assert len(said) <= 3


async def test_another_coordinator_at_the_address_is_what_the_node_waits_for(autojump_clock, pool, caplog, monkeypatch):
    """In status and log, once and with what to do; also after it was in; when the right one is back, it is in again."""
    caplog.set_level(logging.WARNING)
    ask = membership.request
    answers = True
    tries = 0

    async def another(transport, peer, protocol, *rest, **options):
        nonlocal tries
        if answers:
            return await ask(transport, peer, protocol, *rest, **options)
        tries += 1
        raise AnotherPeer(
            f"cannot reach {peer.peer}: the next try is in {tries}.1 s", "12D3KooWother", "127.0.0.1:4011"
        )

    monkeypatch.setattr(membership, "request", another)
    async with pool.node() as service:
        await trio.sleep(10)
        answers = False
        await trio.sleep(300)
        words = "another coordinator (12D3KooWother) answers at 127.0.0.1:4011; ask the operator for a new join string"
        assert service.status.waiting_for == f"{words} and start with --join"
        assert words in service.status.last_error
        said = [record.getMessage() for record in caplog.records if "not in the pool" in record.getMessage()]
        assert said == [f"not in the pool: {words} and start with --join"]
        assert tries > 5
        answers = True
        await trio.sleep(120)
        assert service.situation.facts.joined
        assert "another" not in service.status.waiting_for + service.status.last_error


@pytest.mark.parametrize("code", ["wire_version", "token_unknown", "session_ended"])
async def test_a_final_no_is_the_last_thing_that_status_and_error_say(autojump_clock, pool, code):
    """The process ends with the coordinator's own words, and leaves them in its status."""
    reason = "install the echo2 release the coordinator runs"
    pool.hello_refusal = Refused(code, reason)
    async with pool.network.transport(pool.identity) as transport:
        service = pool.service(transport)
        with pytest.raises(ConfigurationError, match=reason):
            await service.run()
        assert reason in service.status.last_error


async def test_the_process_that_another_one_with_its_key_has_followed_ends_and_says_so(autojump_clock, pool):
    """It does not come back by itself, so the two do not throw each other out for ever."""
    async with pool.network.transport(pool.identity) as transport, trio.open_nursery() as nursery:
        service = pool.service(transport)
        ended = []

        async def run():
            with pytest.raises(ConfigurationError, match=r"this node's key is in use elsewhere.*stop one of the two"):
                await service.run()
            ended.append(service.status.last_error)

        nursery.start_soon(run)
        await trio.sleep(10)
        hellos = len(pool.hellos)

        async def ended_session(peer, heartbeat):
            raise Refused("session_ended", "another process has gone on with this key since; stop one of the two")

        pool.instead["heartbeat"] = ended_session
        await trio.sleep(30)
        assert "key is in use elsewhere" in ended[0]
        await trio.sleep(600)
        assert len(pool.hellos) == hellos
