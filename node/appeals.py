"""An appeal as its owner writes it, and as it is shown. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.messages import APPEAL_CHARS_MAX

from .papers import Appeal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from echo2.p2p.join import JoinString

SUSPENSION = "suspension"

_LEASE = re.compile(r"[0-9a-f]{32}")


def new_appeal(join: JoinString, about: str, text: str, appeal_id: bytes) -> Appeal:
    """An appeal to be sent. Raises ConfigurationError for one that no coordinator would take."""
    subject, text = about.strip().lower(), text.strip()
    if subject != SUSPENSION and not _LEASE.fullmatch(subject):
        raise ConfigurationError(
            f"{about[:64]!r} is neither a lease nor the word {SUSPENSION}; a lease is 32 hexadecimal digits, as "
            "`echo2-node receipts` lists them"
        )
    if not 1 <= len(text) <= APPEAL_CHARS_MAX:
        raise ConfigurationError(f"an appeal has 1 to {APPEAL_CHARS_MAX} characters; this one has {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError("the text holds bytes that are no characters; write it anew") from error
    return Appeal(appeal_id, join.peer, join.run, subject, text)


def listed(appeals: Sequence[Appeal]) -> Iterator[str]:
    """One paragraph each, the oldest first."""
    if not appeals:
        yield "no appeals"
    for appeal in appeals:
        yield f"{appeal.state:<9} {appeal.run:<16} {appeal.subject}"
        yield f"    {appeal.text}"
        if appeal.answer:
            yield f"    answer: {appeal.answer}"
        if appeal.posting is not None:
            yield f"    posting {appeal.posting} is the adjustment: `echo2-node statement` lists it"
