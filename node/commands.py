"""The owner's word (run, pause, finish), kept where a restart finds it.

`echo2-node pause` writes it into the node's home; the daemon looks there each second. A file, not a socket: it works
while the daemon is down, needs no port, and only who may write into the home can give orders.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from .lifecycle import Command

COMMAND_FILE = "command"

COMMAND_BYTES_MAX = 64

_COMMANDS: dict[str, Command] = {"run": "run", "pause": "pause", "finish": "finish"}


class Commands(Protocol):
    """Where the current command is kept."""

    def read(self) -> Command:
        """The command in force; `run` when none was ever given."""

    def write(self, command: Command) -> None:
        """Put `command` in force, durably."""


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


class FileCommands:
    """The file `command` in a node's home."""

    def __init__(self, home: Path) -> None:
        self._path = home / COMMAND_FILE

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
