"""The join string: the one thing a volunteer is given to take part.

    echo2://PEER@HOST:PORT[,HOST:PORT...]/RUN?token=TOKEN        TOKEN: 36 characters, or `none`

RUN is a name, or `*` for any. `none` is for a pool that asks for no token, or whose operator admits each node by hand.

It pins the coordinator's key (PEER), so a wrong address or a machine in the middle cannot pass for the coordinator. It
survives being pasted with blanks, quotes or line breaks around it; anything else wrong with it is said in words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import BadSignature, ConfigurationError
from .identity import check_peer_id
from .messages import PeerAddress
from .settings import check_multiaddr

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEME = "echo2://"
ADDRESSES_MAX = 16
"""As many as a PeerAddress may carry."""

TOKEN_CHARACTERS = 36
"""As many as every token has: one that was cut is found here, not by the coordinator."""

ANY_RUN = "*"
"""In place of a run's name: the coordinator says which of its runs the node works for, and may move it to another."""
NO_TOKEN = "none"  # noqa: S105 - says that there is none
"""Said, not left out: a string that lost its end would look the same."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[A-Za-z0-9._~-]+")
_NUMBERS = re.compile(r"[0-9.]+")
_MULTIADDR = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class JoinString:
    """Whom to join: the coordinator's peer id, where it listens (multiaddrs), the token (empty: none), the run (or
    ANY_RUN)."""

    peer: str
    addresses: tuple[str, ...]
    token: str
    run: str

    @property
    def coordinator(self) -> PeerAddress:
        """The coordinator, as a transport dials it."""
        return PeerAddress(peer=self.peer, addresses=self.addresses)

    @property
    def run_wanted(self) -> str | None:
        """The only run that the node works for; None: whichever the coordinator says."""
        return None if self.run == ANY_RUN else self.run

    def __str__(self) -> str:
        """The text form. Carries the token: show it only to the person who asked for it."""
        hosts = ",".join(map(_host_port, self.addresses))
        return f"{SCHEME}{self.peer}@{hosts}/{self.run}?token={self.token or NO_TOKEN}"

    def __repr__(self) -> str:
        """Without the token, so that a log line or a traceback never gives it away."""
        return f"JoinString({self.peer}@{','.join(map(_host_port, self.addresses))}/{self.run})"


def parse_join_string(text: str) -> JoinString:
    """Read a join string. Raises ConfigurationError saying which part is wrong."""
    bare = "".join(text.split()).strip("\"'`<>")
    if not bare.startswith(SCHEME):
        raise _wrong(f"it must start with {SCHEME}")
    rest = bare.removeprefix(SCHEME)
    place, question, query = rest.partition("?")
    authority, slash, run = place.partition("/")
    peer, at, hosts = authority.partition("@")
    if not at:
        raise _wrong("there is no '@' between the coordinator's peer id and its address")
    try:
        check_peer_id(peer)
    except BadSignature as error:
        raise _wrong(f"{peer[:64]!r} is not a peer id") from error
    addresses = _addresses(hosts.split(","))
    if not slash or not run:
        raise _wrong("the run's name is missing after the address")
    if run != ANY_RUN and not _NAME.fullmatch(run):
        raise _wrong(f"{run[:64]!r} is not a run's name")
    key, _, token = query.partition("=")
    if not question or key != "token" or not token:
        raise _wrong("?token=... is missing at its end")
    if not _TOKEN.fullmatch(token):
        raise _wrong("the token has characters that no token has")
    if token == NO_TOKEN:
        return JoinString(peer=peer, addresses=addresses, token="", run=run)
    if len(token) != TOKEN_CHARACTERS:
        raise _wrong(f"its token has {len(token)} characters, and every token has {TOKEN_CHARACTERS}")
    return JoinString(peer=peer, addresses=addresses, token=token, run=run)


def _wrong(what: str) -> ConfigurationError:
    return ConfigurationError(f"this join string is not complete or was changed: {what}; copy it again, whole")


def _addresses(hosts: Sequence[str]) -> tuple[str, ...]:
    if len(hosts) > ADDRESSES_MAX:
        raise _wrong(f"more than {ADDRESSES_MAX} addresses")
    return tuple(map(_multiaddr, hosts))


def _multiaddr(host_port: str) -> str:
    host, colon, port = host_port.rpartition(":")
    if not colon or not host:
        raise _wrong(f"{host_port[:64]!r} is not HOST:PORT")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise _wrong(f"the port {port[:16]!r} is not a number from 1 to 65535")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    kind = "ip6" if bare != host else "ip4" if _NUMBERS.fullmatch(host) else "dns"
    try:
        return check_multiaddr(f"/{kind}/{bare}/tcp/{int(port)}")
    except ValueError as error:
        if kind == "ip4":
            raise _wrong(f"{host[:64]} is not an IP address") from error
        raise _wrong(f"{host[:64]!r} is neither a host name nor an IP address (IPv6 goes in brackets)") from error


def _host_port(address: str) -> str:
    match = _MULTIADDR.fullmatch(address)
    if match is None:
        raise ConfigurationError(
            f"{address!r} cannot be put in a join string; use an address like /ip4/1.2.3.4/tcp/4001"
        )
    kind, host, port = match.groups()
    return f"[{host}]:{port}" if kind == "ip6" else f"{host}:{port}"
