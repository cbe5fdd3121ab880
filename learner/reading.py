"""Reading what a person put into a folder, or somebody they had it from: what goes wrong is one line that names it.

Libraries raise anything at all when a file is damaged or was made by hand, bare `Exception` and failed assertions among
it. So it is turned into our error in one place, and not by a list of types beside every call that never was complete.
"""

from __future__ import annotations

import codecs
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TABLE_BYTES_MAX = 256 << 20
"""The largest tokenizer.json there is has some tens of megabytes."""

CAUSE_CHARACTERS_MAX = 300

RUST_PANIC = "PanicException"
"""A library's own mistake, in Rust; Python is told of it by what is not even an Exception."""


@contextmanager
def reading(what: object, fails: str = "cannot be used") -> Iterator[None]:
    """What the block raises becomes a ConfigurationError that begins with `what`, the file or folder that is read.

    Nothing may be written in the block: a full disk is no fault of what was read.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
            raise  # Ctrl-C, or the end of the process
        raise ConfigurationError(f"{what} {fails}: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """What an error says, in one line of bounded length."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for what it asks for"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())[:CAUSE_CHARACTERS_MAX]
    if isinstance(error, KeyError):
        return f"{text} is missing"
    return text or type(error).__name__


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigurationError."""
    text = read_text(path, "model file", bytes_max=TABLE_BYTES_MAX)
    with reading(path, "is not JSON"):
        with path.open("rb") as file:
            marked = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
        if marked:  # the file goes on to programs that do not leave it out
            raise ValueError("it begins with a byte order mark")
        value = json.loads(text)
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} is not a table of settings")
    return value
