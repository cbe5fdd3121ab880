"""The engine's process, and how it is bound to this one.

On Linux the child asks the system to be killed when its parent dies (`engine_process`): even one that is stopped, or
deep in a driver, then goes. Linux takes for the parent the thread that started the child, and trio starts processes in
a thread that ends when it has idled for a while. So there it is started from this thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENDED_LOOK_SECONDS = 0.005
"""Between looks whether a child has ended, which it does at once when it is killed."""


class Child(Protocol):
    """What the engine needs of a process: the part of `trio.Process` that both kinds have."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it lives."""

    @property
    def stdin(self) -> trio.abc.SendStream | None:
        """What is written here it reads."""

    @property
    def stdout(self) -> trio.abc.ReceiveStream | None:
        """What it writes is read here."""

    def kill(self) -> None:
        """End it at once."""

    async def wait(self) -> int:
        """Until it has ended; how."""


async def start_child(command: Sequence[str], environment: Mapping[str, str]) -> Child:
    """A process with pipes for stdin and stdout. Raises OSError."""
    if sys.platform == "linux":
        return LinuxChild(command, environment)
    return await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment)
    )


class LinuxChild:
    """See the module and `Child`. Raises OSError."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        stdin_out, stdin_in = os.pipe()
        stdout_out, stdout_in = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                command, stdin=stdin_out, stdout=stdout_in, env=dict(environment)
            )
        except OSError:
            os.close(stdin_in)
            os.close(stdout_out)
            raise
        finally:
            os.close(stdin_out)
            os.close(stdout_in)
        self.pid = self._process.pid
        self.stdin = trio.lowlevel.FdStream(stdin_in)
        self.stdout = trio.lowlevel.FdStream(stdout_out)

    @property
    def returncode(self) -> int | None:
        """See `Child`."""
        return self._process.poll()

    def kill(self) -> None:
        """See `Child`."""
        self._process.kill()

    async def wait(self) -> int:
        """See `Child`."""
        while (code := self._process.poll()) is None:  # noqa: ASYNC110  # no event: trio waits only for processes it started
            await trio.sleep(ENDED_LOOK_SECONDS)
        return code
