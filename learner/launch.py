"""The processes of a learner on several devices: how each knows its place, how the first starts the others. No torch.

The first process (rank 0) is the learner: network, buffer, checkpoints, publishing. The others (helpers) only compute
what it tells them (`helper`), keep nothing, and end with it. They are started in one of two ways:

- `echo2-learner run --processes N`: one machine. The first starts the others with its own command line. They meet
  through a file in the learner's home and talk over the loopback interface only: no port is open to others.
- `torchrun ... -m echo2.learner run`: several machines. Places and the meeting point come from torchrun; whoever
  reaches its ports is trusted, so only in a network of one's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from echo2.p2p.daemon import EXIT_FAILED
from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STORE_VARIABLE = "ECHO2_LEARNER_STORE"
"""In a helper's environment: the file through which the processes of this machine meet."""

STORE_FILE = "processes.store"

PROCESSES_MAX = 1024

END_SECONDS = 5.0
"""From telling the helpers to end until they are killed. They keep nothing, so there is little to wait for."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Which process of the learner this is. `store` is None when torchrun says where they meet."""

    rank: int
    size: int
    local_rank: int
    store: Path | None = None


def place_in(environment: Mapping[str, str]) -> Place | None:
    """This process's place as its starter set it; None when it is alone. Raises ConfigurationError."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise ConfigurationError(
            f"RANK, WORLD_SIZE and LOCAL_RANK in the environment are not numbers ({error}); unset them, or start the "
            "learner with torchrun"
        ) from error
    if not 0 <= rank < size <= PROCESSES_MAX:
        raise ConfigurationError(
            f"RANK = {rank} with WORLD_SIZE = {size} in the environment makes no sense; unset them, or start the "
            "learner with torchrun"
        )
    store = environment.get(STORE_VARIABLE)
    return None if size == 1 else Place(rank, size, local_rank, Path(store) if store else None)


def first_place(size: int, home: Path) -> Place:
    """The place of the process that starts `size` - 1 others on this machine. Its `home` is locked. Raises OSError."""
    home.mkdir(parents=True, exist_ok=True)
    store = home.resolve() / STORE_FILE
    store.unlink(missing_ok=True)  # what the processes of before wrote would be taken for these ones' words
    _talk_over_loopback(os.environ)
    return Place(0, size, 0, store)


class Helpers:
    """The other processes of this machine, which this one started. Nothing of them outlives it."""

    def __init__(self, place: Place, argv: Sequence[str]) -> None:
        self._size = place.size
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, place.size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(place.size),
                STORE_VARIABLE: str(place.store),
            }
            process = subprocess.Popen(  # noqa: S603 - this project's own command
                argv,
                env=environment,
                stdin=subprocess.PIPE,  # its end tells them that this process is gone, however it went
                stdout=sys.stderr.fileno(),
                start_new_session=True,  # Ctrl-C is for the first process, which then ends them
            )
            self._processes.append(process)

    def lost(self) -> str | None:
        """What became of one that has ended; None while all live."""
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is not None:
                how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                return f"process {rank} of {self._size} (pid {process.pid}) {how}"
        return None

    def kill(self) -> None:
        """At once, stopped ones too."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()

    def close(self) -> None:
        """Wait a little for those that were told to end, then kill them."""
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        for process in self._processes:
            process.wait()


def helper_command(arguments: Sequence[str]) -> list[str]:
    """argv of a helper: the learner's own command line, run by this same installation."""
    return [sys.executable, "-m", "echo2.learner", *arguments]


def follow_first(place: Place) -> None:
    """In a helper: end when told to, and when the first process is gone. Nothing here needs an orderly end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if place.store is not None:  # else stdin is not a line to the first process, and torchrun ends its own
        threading.Thread(target=_end_with_first, daemon=True, name="lifeline").start()


def give_up(message: str, helpers: Helpers | None) -> NoReturn:
    """End this process at once with a word to the person who started it: what is durable is enough to go on from.

    Not by an exception: a thread that waits inside a device's library for a lost process cannot be woken.
    """
    log.error("%s", message)
    if helpers is not None:
        helpers.kill()
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


def _end_with_first() -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 1):  # not sys.stdin, whose lock this thread would still hold when the interpreter ends
            pass
    os._exit(EXIT_FAILED)


def _talk_over_loopback(environment: os._Environ[str]) -> None:
    """Unless its owner says otherwise: gloo and NCCL would choose an interface by the machine's name."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if name is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(variable, name)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
