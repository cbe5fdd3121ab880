"""The Noise handshake up to the message that carries the key, with a key that is not Ed25519's."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from fuzz.wire import HELLO_LINES, Tcp
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyType
from libp2p.crypto.pb import crypto_pb2
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.noise.pb import noise_pb2

FOREIGN = [kind.name for kind in KeyType if kind is not KeyType.Ed25519]


def key_message(kind: str, data: bytes) -> bytes:
    """libp2p's PublicKey message."""
    return crypto_pb2.PublicKey(key_type=KeyType[kind].value, data=data).SerializeToString()


async def shake_with_key(stream: Any, target: str | None, kind: str, data: bytes = b"\x30\x00") -> None:
    """Dial `target` (None: answer whoever dials) and show a key of that kind; until the other end is done with us."""
    payload = noise_pb2.NoiseHandshakePayload(identity_key=key_message(kind, data), identity_sig=b"x")

    class Payload:
        def serialize(self) -> bytes:
            return payload.SerializeToString()

    class Hostile(PatternXX):
        def make_handshake_payload(self, extensions: Any = None) -> Any:
            return Payload()

    tcp = Tcp(stream)
    keys = create_new_key_pair(os.urandom(32))
    noise = Hostile(ID.from_pubkey(keys.public_key), keys.private_key, create_noise_key_pair().private_key)
    with suppress(Exception):  # it ends in whatever libp2p has for a connection that is gone
        await tcp.write(HELLO_LINES["noise"])
        await tcp.read(len(HELLO_LINES["noise"]))
        if target is None:
            await noise.handshake_inbound(RawConnection(tcp, False))
        else:
            await noise.handshake_outbound(RawConnection(tcp, True), ID.from_base58(target))
        await tcp.read(1)
