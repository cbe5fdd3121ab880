"""The owner's word (run, pause, finish), kept where a restart finds it.

`echo2-node pause` writes it into the node's home; the daemon looks there each second. A file, not a socket: it works
while the daemon is down, needs no port, and only who may write into the home can give orders.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import home_path

if TYPE_CHECKING:
    from .lifecycle import Command

HOME_DEFAULT = Path("~/.echo2-node")

COMMAND_FILE = "command"

COMMAND_BYTES_MAX = 64

_COMMANDS: dict[str, Command] = {"run": "run", "pause": "pause", "finish": "finish"}


class Commands(Protocol):
    """Where the current command is kept."""

    def read(self) -> Command:
        """The command in force; `run` when none was ever given."""

    def write(self, command: Command) -> None:
        """Put `command` in force, durably."""

    def line(self, word: str) -> str:
        """The command line that says `word` (run, status, pause, resume, finish) to this node."""


def command_line(word: str, home: Path) -> str:
    """`echo2-node WORD`, with `--home` where the node in `home` would else not be meant; right in any folder."""
    folder = home_path(home).absolute()
    if folder == home_path(HOME_DEFAULT):
        return f"echo2-node {word}"
    return f"echo2-node {word} --home {shlex.quote(str(folder))}"


class MemoryCommands:
    """For simulations: kept as long as the object, which outlives a simulated crash."""

    def __init__(self, command: Command = "run") -> None:
        self._command = command

    def read(self) -> Command:
        """See `Commands`."""
        return self._command

    def write(self, command: Command) -> None:
        """See `Commands`."""
        self._command = command

    def line(self, word: str) -> str:
        """See `Commands`."""
        return f"echo2-node {word}"


class FileCommands:
    """The file `command` in a node's home."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._path = home / COMMAND_FILE

    def line(self, word: str) -> str:
        """See `Commands`."""
        return command_line(word, self._home)

    def read(self) -> Command:
        """See `Commands`. A file that cannot be read or says something else counts as `pause`: never run unasked."""
        try:
            with self._path.open("rb") as file:
                word = file.read(COMMAND_BYTES_MAX).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return "run"
        except OSError:
            return "pause"
        return _COMMANDS.get(word, "pause")

    def write(self, command: Command) -> None:
        """See `Commands`. Raises ConfigurationError when the home cannot be written."""
        temporary = self._path.with_name(f".{COMMAND_FILE}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="ascii") as file:
                file.write(f"{command}\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:
            raise ConfigurationError(f"cannot write {self._path}: {error.strerror}") from error
