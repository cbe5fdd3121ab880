"""The model's tokeniser for nodes of a multi-turn run: they encode what the environment says between two turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.p2p.errors import Refused
from echo2.p2p.messages import TOKENIZER_BYTES_MAX, TOKENIZER_PIECE_BYTES, TokenizerReply

if TYPE_CHECKING:
    from echo2.p2p.messages import TokenizerRequest

    from .office import Office


class TokenizerDesk:
    """Hands out `tokenizer.json` in pieces. Its hash is in the run's signed descriptor."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def piece(self, peer: str, request: TokenizerRequest) -> TokenizerReply:
        """Up to `TOKENIZER_PIECE_BYTES` from `offset` on. Raises Refused."""
        office = self._office
        office.known_node(peer, request.run)
        if office.prompts.sandbox is None:
            raise Refused("one_turn", "nodes of a run of single turns need no tokenizer")
        text = office.prompts.text
        data = text.tokenizer_json
        if not data or len(data) > TOKENIZER_BYTES_MAX:
            raise Refused("tokenizer", f"the tokenizer has {len(data)} bytes, not 1 to {TOKENIZER_BYTES_MAX}")
        return TokenizerReply(
            length_bytes=len(data),
            data=data[request.offset : request.offset + TOKENIZER_PIECE_BYTES],
            card=text.card.model_dump_json(),
        )
