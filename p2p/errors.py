"""Errors of the wire. The type says whose fault it was, and so whether to try again.

| class            | whose fault        | what the catcher does                                  |
|------------------|--------------------|--------------------------------------------------------|
| ProtocolError    | the other peer's   | count it against the peer, drop the stream, carry on   |
| Refused          | ours, says a peer  | do what `code` asks; do not repeat the same request    |
| Unreachable      | the network's      | back off and try again                                 |
| StorageFailed    | this machine's     | keep what there is, say so in status, wait, try again  |
| ConfigurationError | the user's       | print the message, exit 2, no traceback                |
"""

from __future__ import annotations

RETRY_SECONDS_MAX = 900.0
"""Longest that any peer's word keeps us from asking again. Above the longest that we ask of others (ten minutes, of who
was served twice); a mended peer, or a number nobody meant, costs a quarter of an hour."""


class Echo2Error(Exception):
    """Base of every error this project raises on purpose; `str(error)` is fit to show a person."""


class ConfigurationError(Echo2Error):
    """The person who started this process must change something; the message says what."""


class Unreachable(Echo2Error):
    """The network did not deliver: no connection, a stream cut, a time-out. Trying again is right."""


class AnotherPeer(Unreachable):
    """Another key answers where a peer was dialled: its peer id is `found`, `where` is HOST:PORT, empty if unknown.

    Trying again is right all the same: the peer may come back, or have other addresses by then.
    """

    def __init__(self, text: str, found: str, where: str = "") -> None:
        super().__init__(text)
        self.found = found
        self.where = where


class Refused(Echo2Error):
    """A peer understood the request and said no. `code` is stable; `retry_seconds` is None when it is final.

    More than `RETRY_SECONDS_MAX` is cut to it, here, so that no way of obeying a refusal can forget to.
    """

    def __init__(self, code: str, detail: str, retry_seconds: float | None = None) -> None:
        super().__init__(f"{detail} [{code}]")
        self.code = code
        self.detail = detail
        self.retry_seconds = None if retry_seconds is None else min(retry_seconds, RETRY_SECONDS_MAX)


class StorageFailed(Echo2Error):
    """Our own disk would not take or give bytes. Nothing is lost: what was verified before stays and is resumed."""


class StorageFull(StorageFailed):
    """No room for a snapshot; the message says how much is missing and where."""


class ProtocolError(Echo2Error):
    """A peer broke the contract. Costs the sender, never this process."""


class Truncated(ProtocolError):
    """The byte stream ended before END: never taken for a complete message."""


class Stalled(ProtocolError):
    """A request was begun and did not come in time. A poor line does that too: it is held against strangers alone."""


class FrameTooLarge(ProtocolError):
    """A frame's announced length is above the bound of the expected message types."""


class OwnFrameTooLarge(FrameTooLarge):
    """A message of our own is above its bound: our fault, never held against the peer that it was for."""


class MalformedFrame(ProtocolError):
    """Not msgpack, not a map, or text that is not UTF-8."""


class UnexpectedMessage(ProtocolError):
    """A well-formed message of a type the protocol does not allow at this point."""


class SchemaViolation(ProtocolError):
    """A field is missing, unknown, of the wrong type, out of bounds, or not a finite number."""


class BadSignature(ProtocolError):
    """The signature does not cover these bytes under the expected key and domain label."""


class BadChunk(ProtocolError):
    """A chunk's bytes do not hash to what the manifest names. The authenticated sender is banned."""


class BadDelta(ProtocolError):
    """A delta that is cut, damaged, or does not make the snapshot that was announced from the base that is here."""


class StaleManifest(ProtocolError):
    """A manifest whose (epoch, version) is not above the highest already accepted for this key and run."""
