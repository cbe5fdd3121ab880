"""Which keys a stranger may make us parse: Ed25519, and no other.

Of py-libp2p 0.8.1: the third Noise message carries the sender's key, and is parsed as whatever type it says before
anything is verified (`security/noise/messages.py:187`). Of an RSA key `RSAPublicKey.from_bytes` makes pycryptodome test
the primes of a *private* one: 6 KB sent by anybody held this process up for 13 s. Peer ids take the same way
(`peer/id.py:254`). No peer of ours has another type, so here every other is refused by its number alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from libp2p.crypto.keys import KeyType
from libp2p.crypto.serialization import key_type_to_public_key_deserializer as deserializers

from .errors import BadSignature

if TYPE_CHECKING:
    from collections.abc import Callable


class UnfitKey(BadSignature):
    """A peer showed a key of another type than Ed25519. It loses the connection; nothing of its key was parsed."""


def allow_ed25519_alone() -> None:
    """From now on, in this whole process, libp2p parses no public key of another type. Before the first handshake."""
    for kind in KeyType:
        if kind is not KeyType.Ed25519:
            deserializers[kind.value] = _refusing(kind)


def unfit_key(error: BaseException | None) -> UnfitKey | None:
    """The refusal behind an error of libp2p, which raises its own while it handles ours."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, UnfitKey):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _refusing(kind: KeyType) -> Callable[[bytes], NoReturn]:
    def refuse(_data: bytes) -> NoReturn:
        raise UnfitKey(f"a key of type {kind.name}; a peer's key is Ed25519")

    return refuse
