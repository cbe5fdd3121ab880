"""The tokenizer on its way to a node."""

from __future__ import annotations

import random

import pytest

from echo2.coordinator.simulated_model import simulated_text
from echo2.node.tokenizer import fetch_text
from echo2.p2p.channel import answering
from echo2.p2p.errors import Refused, SchemaViolation
from echo2.p2p.identity import Identity
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import PeerAddress, RunDescriptor, Sampling, TokenizerReply, TokenizerRequest

COORDINATOR, NODE = Identity(b"\1" * 32), Identity(b"\2" * 32)


def descriptor(sha256):
    return RunDescriptor(
        run="r",
        task="race",
        model="m",
        tokenizer_sha256=bytes.fromhex(sha256),
        vocabulary_size=13,
        context_tokens=64,
        learner=PeerAddress(peer=COORDINATOR.peer_id),
        staleness_max=1,
        publish_period=1,
        rollouts_per_step=4,
        group_size=4,
        steps=1,
        sampling=Sampling(temperature=1.0, tokens_max=8, stop_ids=(10,)),
    )


async def fetched(serve, sha256=None):
    """What a node gets from a coordinator that answers by `serve(offset)`."""
    network = MemoryNetwork(random.Random(0), delay_seconds=0.01)

    async def answer(_peer, message):
        return serve(message.offset)

    async with network.transport(COORDINATOR) as coordinator, network.transport(NODE) as node:
        coordinator.set_handler("tokenizer", answering(TokenizerRequest, answer, lambda *_: None))
        address = PeerAddress(peer=COORDINATOR.peer_id, addresses=coordinator.addresses)
        return await fetch_text(node, address, descriptor(sha256 or simulated_text().card.tokenizer_sha256))


def pieces(data, card, *, piece=100, length=None):
    """A coordinator that hands out so many bytes at a time."""
    return lambda offset: TokenizerReply(
        length_bytes=length or len(data), data=data[offset : offset + piece], card=card
    )


async def test_it_comes_whole_from_many_pieces():
    """And encodes as the coordinator does."""
    ours = simulated_text()
    text = await fetched(pieces(ours.tokenizer_json, ours.card.model_dump_json()))
    assert text.card == ours.card
    assert text.encode("21+2=") == ours.encode("21+2=")


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (lambda data, card: pieces(data[:-1] + b" ", card), "not the one"),
        (lambda data, card: pieces(data, card, length=len(data) + 1), "breaks off"),
        (lambda data, card: pieces(data, "{}"), "belong together"),
        (
            lambda data, card: pieces(data, card.replace('"tokenizer_sha256":"', '"tokenizer_sha256":"0')),
            "belong together",
        ),
    ],
)
async def test_what_is_not_what_was_signed_is_refused(serve, why):
    """Another byte, too few bytes, no card, another tokenizer's card."""
    ours = simulated_text()
    with pytest.raises(SchemaViolation, match=why):
        await fetched(serve(ours.tokenizer_json, ours.card.model_dump_json()))


async def test_a_refusal_is_told():
    """With its code."""

    def refuse(_offset):
        raise Refused("one_turn", "nodes of a run of single turns need no tokenizer")

    with pytest.raises(Refused, match="need no tokenizer"):
        await fetched(refuse)
