"""Keys of other types than Ed25519 are refused before a byte of them is parsed, wherever libp2p would parse one."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing
from fuzz.foreign_key import FOREIGN, key_message, shake_with_key
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.peer.id import ID
from multihash import Func, digest

from echo2.p2p.errors import BadSignature, Unreachable
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_keys import UnfitKey, allow_ed25519_alone
from echo2.p2p.libp2p_tcp import BufferedTcp, HostPort
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.libp2p_upgrade import Upgrader

ALICE, BOB = (Identity(bytes([n]) * 32) for n in (1, 2))


@pytest.fixture
def parsed(monkeypatch):
    """Every key that reaches a parser which is not Ed25519's."""
    found = []
    for parser in ("libp2p.crypto.rsa.RSA.import_key", "libp2p.crypto.secp256k1.coincurve.PublicKey"):
        monkeypatch.setattr(parser, found.append)
    return found


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_keys_are_refused_by_their_type(parsed, kind):
    """Noise's payload and a peer id with the key inside take this way; an Ed25519 key is parsed as before."""
    allow_ed25519_alone()
    with pytest.raises(UnfitKey, match=rf"{kind}.*Ed25519"):
        deserialize_public_key(key_message(kind, b"x" * 100))
    with suppress(UnfitKey):
        ID(digest(key_message(kind, b"x"), Func.identity).encode()).extract_public_key()
    assert issubclass(UnfitKey, BadSignature)
    assert not parsed
    ours = create_new_key_pair(ALICE.seed).public_key
    assert deserialize_public_key(ours.serialize()) == ours


@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_stranger_with_a_foreign_key_loses_its_connection_unparsed(parsed, kind):
    """The listening side parses nothing of it, and raises what names the fault."""
    ends = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake_with_key, ends[1], ALICE.peer_id, kind)
        with pytest.raises(UnfitKey, match=kind):
            await Upgrader(ALICE).inbound(BufferedTcp(ends[0]))
        await trio.aclose_forcefully(ends[0])
    assert not parsed


@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_foreign_key_at_a_dialled_address_is_unreachable(parsed, kind):
    """Dialling and the dial back: whoever answers there with another kind of key makes us parse nothing."""
    async with open_libp2p_transport(ALICE, []) as alice, trio.open_nursery() as nursery:
        listeners = await nursery.start(_answer_with, kind)
        host, port = listeners[0].socket.getsockname()[:2]
        with pytest.raises(Unreachable, match="did not prove"):
            await alice.prove(BOB.peer_id, HostPort(host, port))
        nursery.cancel_scope.cancel()
    assert not parsed


async def _answer_with(kind, task_status):
    async def answer(stream):
        await shake_with_key(stream, None, kind)

    await trio.serve_tcp(answer, 0, host="127.0.0.1", task_status=task_status)
