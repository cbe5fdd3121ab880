"""What an honest machine may get wrong costs it a reason and a wait, never a ban; what only a liar sends is counted."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from echo2.coordinator import admission
from echo2.p2p.errors import Refused, Unreachable
from echo2.p2p.guards import OFFENCES_MAX
from echo2.p2p.messages import Heartbeat, HeartbeatBody, HeartbeatReply, Message, Welcome

pytestmark = pytest.mark.slow_on_postgresql

AGAIN = OFFENCES_MAX + 2
"""More often than the transport bears breaches of the protocol."""


class OtherHello(Message):
    """A hello as another release may write it."""

    TYPE = "hello"
    wire_versions: tuple[int, ...]
    software: Any = "echo2-node 9"
    colour: str = "green"


def offences(world):
    return sum(world.network.find(world.coordinator.peer_id).offences.values())


@pytest.mark.parametrize("software", ["echo2-node 9", 9, "x" * 60_000], ids=["named", "a number", "long"])
async def test_a_hello_of_another_release_is_told_what_is_needed_each_time(autojump_clock, world, software):
    """Its fields are not ours; its versions are all that is read, and the answer is the same the tenth time."""
    async with world.serving(), world.node(10) as node:
        for _ in range(AGAIN):
            with pytest.raises(Refused, match=r"speaks wire version 1.*install the echo2 release") as refused:
                await node.ask("hello", OtherHello(wire_versions=(2, 3), software=software), Welcome)
            assert refused.value.code == "wire_version"
        assert offences(world) == 0


@pytest.mark.parametrize("versions", [(), (1,), (2, True), ("2",), tuple(range(2, 40))])
async def test_other_fields_are_forgiven_to_other_versions_only(autojump_clock, world, versions):
    """Who says that it speaks ours, or nothing that is a version, has broken the schema."""

    class Malformed(OtherHello):
        wire_versions: Any

    async with world.serving(), world.node(10) as node:
        with pytest.raises(Unreachable):
            await node.ask("hello", Malformed(wire_versions=versions), Welcome)
        assert offences(world) == 1


async def test_tokens_roles_and_runs_that_are_wrong_are_no_breach(autojump_clock, world):
    """Each is refused with its reason however often it is tried."""
    async with world.serving(), world.node(10) as node, world.learner(3) as other, world.node(2) as learner:
        for _ in range(AGAIN):
            for code, asking in (
                ("token_missing", node.hello()),
                ("token_unknown", node.hello("never made")),
                ("hello_first", node.heartbeat()),
                ("not_the_learner", other.hello()),
                ("not_a_node", learner.hello(world.token())),
            ):
                with pytest.raises(Refused) as refused:
                    await asking
                assert refused.value.code == code
        assert offences(world) == 0


async def test_a_full_pool_says_so_and_takes_a_node_when_another_has_gone(autojump_clock, world, monkeypatch):
    """No more live nodes than one plan holds: those that are in stay in, the next one is told when to come again."""
    monkeypatch.setattr(admission, "NODES_MAX", 1)
    async with world.serving(), world.node(10) as first, world.node(11) as second:
        await first.join()
        token = world.token(uses=1)
        for _ in range(AGAIN):
            with pytest.raises(Refused, match="1 live nodes") as refused:
                await second.hello(token)
            assert refused.value.code == "pool_full"
            assert refused.value.retry_seconds
            await first.hello()
        await trio.sleep(31)  # three heartbeats of the first are missed
        await second.hello(token)
        assert offences(world) == 0


async def test_a_heartbeat_that_comes_late_or_twice_moves_nothing_and_is_no_breach(autojump_clock, world):
    """A node gives one up for its next one, on another stream: which comes first is the network's choice."""
    async with world.serving(), world.node(10) as node:
        await node.join()
        await node.heartbeat(sequence=7, state="working")
        for sequence in (7, 3):
            with pytest.raises(Refused) as refused:
                await node.heartbeat(sequence=sequence, state="blocked")
            assert refused.value.code == "heartbeat_old"
        (view,) = world.service.nodes_view()
        assert (view.node_says, view.protocol_errors, offences(world)) == ("working", 0, 0)
        await node.heartbeat(sequence=8)


@pytest.mark.parametrize("how", ["foreign", "forged", "another label"])
async def test_a_heartbeat_that_the_sender_did_not_sign_is_a_breach(autojump_clock, world, tools, how):
    """Another node's, whole and said in earnest; one with a changed byte; one that was signed as something else."""
    async with world.serving(), world.node(10) as node, world.node(11) as liar:
        await node.join()
        await liar.join()
        body = HeartbeatBody(
            run="r1",
            session=node.session,
            sequence=100,
            epoch=0,
            version=None,
            manifest_hash=None,
            state="working",
            leases_held=0,
            rollouts_generated=0,
            rollouts_spooled=0,
            tokens_per_second=0.0,
            hold_seconds=0.0,
        )
        signer = node.identity if how == "foreign" else liar.identity
        signed = signer.sign("run" if how == "another label" else "heartbeat", body)
        if how == "forged":
            signed = signed.model_copy(update={"payload": signed.payload[:-1] + b"\x01"})
        with pytest.raises(Unreachable):
            await liar.ask("heartbeat", Heartbeat(body=signed), HeartbeatReply)
        assert world.network.find(world.coordinator.peer_id).offences == {liar.peer_id: 1}
        await node.heartbeat()
