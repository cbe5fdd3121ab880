"""From a byte stream to a connection: multistream-select, Noise, multistream-select again, then our yamux.

The stream may be a TCP socket or anything that carries bytes both ways, such as a stream through a relay. Of py-libp2p
0.8.1: by default it negotiates plaintext too, so peer ids can be forged. Here Noise is the only security there is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.generic_selector import GenericMultistreamSelector
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.transport.upgrader import TransportUpgrader

from .errors import AnotherPeer
from .identity import public_key_of
from .libp2p_keys import allow_ed25519_alone, unfit_key

if TYPE_CHECKING:
    from libp2p.abc import ISecureConn

    from .identity import Identity
    from .libp2p_tcp import BufferedTcp

HANDSHAKE_SECONDS = 10.0
"""Bound on an inbound connection's handshakes: a stranger who stays silent is not waited for."""


_FOUND = re.compile(r"remote_peer_id_from_pubkey=([A-Za-z0-9]+)")
"""Who is there, in the words of py-libp2p 0.8.1, which ends the handshake before it says so in any other way."""


class Upgrader:
    """Secures streams in our name. Whatever the other end makes libp2p raise comes out as it is: the caller's one fault
    is that connection.
    """

    def __init__(self, identity: Identity) -> None:
        allow_ed25519_alone()
        key_pair = create_new_key_pair(identity.seed)
        noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
        self._security = TransportUpgrader({NOISE_ID: noise}, {}, negotiate_timeout=int(HANDSHAKE_SECONDS))
        self._muxers: GenericMultistreamSelector[None] = GenericMultistreamSelector()
        self._muxers.add_handler(TProtocol(YAMUX_ID), None)

    async def outbound(self, socket: BufferedTcp, peer: str) -> ISecureConn:
        """The dialling side's part. Fails unless the other end proves to be `peer`; as another, with AnotherPeer."""
        secured = await self.prove(socket, peer)
        await self._muxers.select(secured, True, int(HANDSHAKE_SECONDS))
        return secured

    async def prove(self, socket: BufferedTcp, peer: str) -> ISecureConn:
        """Only see that `peer` is at the other end; no connection comes of it. Raises as `outbound`."""
        try:
            return await self._security.upgrade_security(RawConnection(socket, True), True, ID.from_base58(peer))
        except Exception as error:
            if (unfit := unfit_key(error)) is not None:
                raise unfit from None
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, PeerIDMismatchesPubkey):
                cause = cause.__cause__
            found = _FOUND.search(str(cause)) if cause is not None else None
            if found is None:
                raise
            raise AnotherPeer(f"another peer ({found[1]}) answers here", found[1]) from None

    async def inbound(self, socket: BufferedTcp) -> ISecureConn:
        """The listening side's part. Raises UnfitKey for a peer whose key is not Ed25519: it could sign nothing."""
        try:
            secured = await self._security.upgrade_security(RawConnection(socket, False), False)
        except Exception as error:
            if (unfit := unfit_key(error)) is not None:
                raise unfit from None
            raise
        public_key_of(str(secured.get_remote_peer()))
        await self._muxers.select(secured, False, int(HANDSHAKE_SECONDS))
        return secured
