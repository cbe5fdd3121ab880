"""A message of our own that is above its bound is our fault: said to whoever waits for it, held against nobody."""

from __future__ import annotations

import random

import pytest
import trio

from echo2.p2p.channel import answering, hold_against, request
from echo2.p2p.errors import OwnFrameTooLarge, Refused
from echo2.p2p.identity import Identity
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import Ack, PeerAddress, PublishReply, Signed, SliceAck, SubmitReply

ASKER, ANSWERER = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
PEER = PeerAddress(peer=ANSWERER.peer_id, addresses=("/memory/answerer",))
HUGE = PublishReply(plan=Signed(payload=bytes(PublishReply.BYTES_MAX), signature=bytes(64)))


async def test_a_reply_above_its_bound_is_a_refusal_and_no_breach_of_the_askers(autojump_clock, caplog):
    """The asker is told, may come again, and is not counted; our log says which reply it was."""
    network = MemoryNetwork(random.Random(0), delay_seconds=0.01)
    complaints = []

    async def answer(peer, message):
        return HUGE if message.count else Ack()

    async with network.transport(ASKER) as asker, network.transport(ANSWERER) as answerer:
        answerer.set_handler("report", answering(Ack, answer, lambda *what: complaints.append(what)))
        with pytest.raises(Refused) as refused:
            await request(asker, PEER, "report", Ack(count=1), PublishReply)
        assert refused.value.code == "too_large"
        assert refused.value.retry_seconds
        assert await request(asker, PEER, "report", Ack(), Ack) == Ack()
    assert complaints == []
    assert "publish-reply" in caplog.text


async def test_a_request_above_its_bound_is_the_askers_own(autojump_clock):
    """It fails at the asker, by its own name; neither end counts it."""
    network = MemoryNetwork(random.Random(0), delay_seconds=0.01)
    async with network.transport(ASKER) as asker, network.transport(ANSWERER) as answerer:
        heard = []
        answerer.set_handler("report", answering(Ack, heard.append, lambda *what: heard.append(what)))
        with pytest.raises(OwnFrameTooLarge) as failed:
            await request(asker, PEER, "report", HUGE, Ack)
        hold_against(asker, PEER.peer, failed.value)
        await trio.sleep(1)
        assert asker.offences == answerer.offences == {}
        assert heard == []


def test_the_largest_acknowledgement_fits():
    """As many slices as one request has, each with the longest reason in the widest characters."""
    ack = SliceAck(lease_id=bytes(16), state="x" * 64, reason="\N{GRINNING FACE}" * 512)
    from echo2.p2p.codec import encode_frame

    encode_frame(SubmitReply(acks=(ack,) * 64))
