"""Sessions of browsers: a cookie instead of a token, because a page can keep no secret from the scripts in it.

| what                | is                                                                                            |
|---------------------|-----------------------------------------------------------------------------------------------|
| the cookie          | 256 bits; here only its SHA-256. HttpOnly, SameSite=Strict, Path=/, Secure under TLS           |
| the CSRF token      | HMAC(cookie, label): nothing to keep, and only who has the cookie can say it                  |
| it ends             | unused for IDLE_SECONDS, ABSOLUTE_SECONDS after it began, with its token, or when it is closed |

Kept in memory: a restart asks people to log in again. Pure: time and entropy are arguments.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

COOKIE = "echo2-session"
SECURE_COOKIE = f"__Host-{COOKIE}"
"""Under TLS: browsers take a cookie of this name only with Secure and Path=/, and of no other host."""

CSRF_HEADER = "X-CSRF-Token"

COOKIE_BYTES = 32

IDLE_SECONDS = 1800.0
"""A page that is open asks every few seconds; half an hour of silence is a closed laptop."""

ABSOLUTE_SECONDS = 12 * 3600.0
"""A working day."""

SESSIONS_MAX = 256
SESSIONS_OF_TOKEN_MAX = 16
"""Beyond, the one unused for longest ends: of that token, then of all."""

_CSRF_LABEL = b"echo2/csrf/1"


@dataclass(slots=True)
class Session:
    """One browser that has logged in. `access`: the SHA-256 of the token it did so with. Monotonic seconds."""

    access: bytes
    begun: float
    used: float


class Sessions:
    """Every open session, the longest unused first."""

    def __init__(self, entropy: Callable[[int], bytes]) -> None:
        self._entropy = entropy
        self._open: dict[bytes, Session] = {}

    def open(self, access: bytes, now: float) -> str:
        """A new session's cookie."""
        own = [key for key, session in self._open.items() if session.access == access]
        for key in own[: max(0, len(own) - SESSIONS_OF_TOKEN_MAX + 1)]:
            del self._open[key]
        while len(self._open) >= SESSIONS_MAX:
            del self._open[next(iter(self._open))]
        cookie = self._entropy(COOKIE_BYTES).hex()
        self._open[_digest(cookie)] = Session(access, now, now)
        return cookie

    def find(self, cookie: str, now: float) -> Session | None:
        """The open session of this cookie; it counts as used."""
        key = _digest(cookie)
        session = self._open.pop(key, None)
        if session is None or now - session.used >= IDLE_SECONDS or now - session.begun >= ABSOLUTE_SECONDS:
            return None
        session.used = now
        self._open[key] = session
        return session

    def is_open(self, cookie: str) -> bool:
        """Whether it has not been closed; this is no use of it."""
        return _digest(cookie) in self._open

    def close(self, cookie: str) -> None:
        """End it, if it is open."""
        self._open.pop(_digest(cookie), None)


def csrf_of(cookie: str) -> str:
    """What a change by this cookie must name in CSRF_HEADER."""
    return hmac.new(cookie.encode(), _CSRF_LABEL, hashlib.sha256).hexdigest()


def csrf_holds(cookie: str, said: str) -> bool:
    """Whether it does. Takes as long for any answer."""
    return hmac.compare_digest(csrf_of(cookie).encode(), said.encode())


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()
