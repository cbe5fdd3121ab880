"""The run's tokeniser, fetched from the coordinator: only nodes of multi-turn runs need it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pydantic import ValidationError

from echo2.p2p.channel import request
from echo2.p2p.errors import SchemaViolation
from echo2.p2p.messages import TokenizerReply, TokenizerRequest
from echo2.tasks.model_card import ModelCard
from echo2.tasks.token_text import TokenText

if TYPE_CHECKING:
    from echo2.p2p.messages import PeerAddress, RunDescriptor
    from echo2.p2p.transport import Transport


async def fetch_text(transport: Transport, coordinator: PeerAddress, descriptor: RunDescriptor) -> TokenText:
    """The text of the run's model, its bytes checked against the signed descriptor.

    Raises Unreachable, Refused and ProtocolError (SchemaViolation where the bytes are not what was signed).
    """
    data = bytearray()
    while True:
        ask = TokenizerRequest(run=descriptor.run, offset=len(data))
        reply = await request(transport, coordinator, "tokenizer", ask, TokenizerReply)
        data += reply.data
        if len(data) >= reply.length_bytes:
            break
        if not reply.data:
            raise SchemaViolation(f"the tokenizer breaks off after {len(data)} of {reply.length_bytes} bytes")
    if hashlib.sha256(data).digest() != descriptor.tokenizer_sha256:
        raise SchemaViolation("the tokenizer is not the one that the run's descriptor names")
    try:
        return TokenText(ModelCard.model_validate_json(reply.card), bytes(data))
    except (ValidationError, ValueError) as error:
        raise SchemaViolation(f"the tokenizer and its card do not belong together: {error}"[:400]) from error
