"""Who may send the coordinator large requests: seen from the first four bytes of one."""

from __future__ import annotations

import pytest

from echo2.p2p.channel import STRANGER_BYTES_MAX, Channel
from echo2.p2p.codec import LENGTH
from echo2.p2p.errors import Refused, Stalled, Unreachable
from echo2.p2p.messages import Ack, PeerAddress

pytestmark = pytest.mark.slow_on_postgresql

LARGE = {"rollouts": "hello_first", "report": "not_the_learner", "publish": "not_the_learner"}
"""Protocols whose requests may be longer than what a stranger may send, and what is said to it."""


async def begin(world, peer, protocol):
    """Announce a large frame and send none of it: what comes back."""
    coordinator = world.network.find(world.coordinator.peer_id)
    there = PeerAddress(peer=coordinator.peer_id, addresses=coordinator.addresses)
    stream = await peer.transport.open(there, protocol)
    await stream.send_all(LENGTH.pack(STRANGER_BYTES_MAX + 1))
    try:
        await Channel(stream, hurried=True, bytes_max=STRANGER_BYTES_MAX).receive(Ack)
    finally:
        await stream.reset()


@pytest.mark.parametrize("protocol", LARGE)
async def test_a_large_frame_of_one_who_may_not_send_it_is_refused_unread(autojump_clock, world, protocol):
    """A stranger on any protocol, and a node on the learner's, hear why at once; it is no breach."""
    async with world.serving(), world.node(10) as node:
        with pytest.raises(Refused) as refused:
            await begin(world, node, protocol)
        assert refused.value.code == LARGE[protocol]
        await node.hello(world.token())
        if protocol != "rollouts":
            with pytest.raises(Refused, match="not_the_learner"):
                await begin(world, node, protocol)
        assert not world.network.find(world.coordinator.peer_id).offences


async def test_the_learner_and_nodes_are_read(autojump_clock, world):
    """The coordinator waits for the rest of what those send who may: it says nothing yet, and then lets go."""
    async with world.serving(), world.node(10) as node, world.learner() as learner:
        await node.hello(world.token())
        for peer, protocol in ((node, "rollouts"), (learner, "report"), (learner, "publish")):
            with pytest.raises((Stalled, Unreachable)):
                await begin(world, peer, protocol)
        assert not world.network.find(world.coordinator.peer_id).offences
