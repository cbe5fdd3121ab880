"""What an operator does to a pool, and what is told about it."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace

import pytest

from echo2.p2p.errors import Refused
from echo2.tasks.scorer import InlineScorer


async def test_a_suspended_node_can_be_restored(autojump_clock, world):
    """It is told why it was suspended, and takes part again when the operator says so, both on record."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.join()
        service.suspend_node(node.peer_id, actor="operator", reason="forged")
        assert (await node.heartbeat()).node_state == "suspended"
        assert (await node.lease()).reason == "suspended: forged"
        node.installed, installed = bytes(32), node.installed
        assert (await node.lease(samples=1)).reason == "suspended: forged", "whatever snapshot it names"
        service.restore_node(node.peer_id, actor="operator", reason="a mistake")
        assert (await node.heartbeat()).node_state == "active"
        assert (await node.lease(samples=1)).leases == (), "no lease is ever for a snapshot that is none"
        node.installed = installed
        assert (await node.lease()).leases
        events = [(event.action, event.reason) for event in service.events_view()]
        assert events[:2] == [("node active", "a mistake"), ("node suspended", "forged")]


async def test_what_operators_ask_about_later_is_in_the_log(autojump_clock, world, caplog):
    """Admissions, tokens (never the token itself), suspensions and restorations, each with who and why."""
    caplog.set_level(logging.INFO, logger="echo2.coordinator")
    async with world.serving() as service, world.node(10) as node:
        token = world.token(uses=3)
        await node.hello(token)
        await node.hello()
        service.suspend_node(node.peer_id, actor="operator", reason="forged")
        service.restore_node(node.peer_id, actor="operator", reason="a mistake")
    said = [record.getMessage() for record in caplog.records]
    assert "a token for 3 nodes was made by test: test" in said
    assert "node admitted: volunteer" in said
    assert "node is back: volunteer" in said
    assert "volunteer was suspended by operator: forged" in said
    assert "volunteer was restored by operator: a mistake" in said
    assert not any(token in line for line in said)


async def test_the_pool_shows_what_confines_its_scorer(autojump_clock, world):
    """The layers as the scorer reports them now."""

    class Confined(InlineScorer):
        confinement = ("parent", "seccomp")

    world.scorer = Confined({world.task.name: world.task})
    async with world.serving() as service:
        assert service.pool_view().scorer_confinement == ("parent", "seccomp")


async def test_a_token_that_is_revoked_lets_nobody_in(autojump_clock, world):
    """Who is in stays; it is on record who did it and why, and it can be done once."""
    async with world.serving() as service, world.node(10) as early, world.node(11) as late:
        token = world.token(uses=3)
        await early.hello(token)
        name = hashlib.sha256(token.encode()).hexdigest()[:12]
        (before,) = service.tokens_view()
        assert (before.hash_start, before.uses, before.used, before.expires) == (name, 3, 1, None)
        revoked = service.revoke_token(name, actor="ann", reason="posted in a forum")
        assert service.tokens_view() == [revoked] == [replace(before, expires=revoked.expires)]
        with pytest.raises(Refused, match="expired"):
            await late.hello(token)
        await early.hello()
        with pytest.raises(Refused, match="lets nobody in"):
            service.revoke_token(name, actor="ann", reason="again")
        with pytest.raises(KeyError):
            service.revoke_token("0" * 12, actor="ann", reason="x")
        (event, *_) = service.events_view()
        assert (event.actor, event.action, event.subject) == ("ann", "token revoked", name)
        assert service.events_behind(event.id - 1, limit=9) == [event]
        assert service.newest_event() == event.id


async def test_every_step_can_be_read_page_by_page(autojump_clock, world, tools):
    """Behind a step, so many; of a run there is none of, nothing."""
    async with world.serving() as service, world.learner() as learner:
        await learner.hello()
        await learner.publish()
        await learner.report([], [tools.metrics(number, 0) for number in range(3)])
        assert [step.step for step in service.steps_view("r1", after=-1, limit=2)] == [0, 1]
        assert [step.step for step in service.steps_view("r1", after=1, limit=2)] == [2]
        with pytest.raises(KeyError):
            service.steps_view("r2", after=-1, limit=2)
