"""Processes of a kill storm: found in /proc, kept running as a supervisor would, and none lost sight of.

This process adopts what its children leave behind (a subreaper), so an orphan is always a child of it: seen, and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import trio

from echo2.coordinator.demo_process import child_environment, last_line

LOOK_SECONDS = 0.05

HELPERS = {"engine": "echo2.node.engine_process", "scorer": "echo2.tasks.scorer_worker"}
"""What a daemon's own helper has on its command line."""

GONE_SECONDS = 20.0
"""A killed daemon's helpers go at once; this is for a machine that does everything at once."""

STOP_SECONDS = 60.0

OWN_ENDS_MAX = 5
"""Ends of a daemon that nobody caused, before it is not started again."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Linux only: orphans below this process become its children."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this system has no subreapers")


def stat_of(pid: int) -> tuple[str, int] | None:
    """(state, parent) of a process; None once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children_of(parent: int) -> list[int]:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    found = ((pid, stat_of(pid)) for pid in pids)
    return [pid for pid, stat in found if stat is not None and stat[1] == parent and stat[0] != "Z"]


class Daemon:
    """One daemon: its command, its process, how often it was started, and what it did that it should not have done."""

    def __init__(self, name: str, argv: list[str], log: Path):
        self.name = name
        self.argv = argv
        self.log = log
        self.process: trio.Process | None = None
        self.starts = 0
        self.started_at = 0.0
        """Wall clock, as files have it."""

        self.struck = False
        self.ending = False
        self.ended = trio.Event()
        self.own_ends: list[str] = []

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    @property
    def given_up(self) -> bool:
        return len(self.own_ends) >= OWN_ENDS_MAX

    async def start(self) -> None:
        with self.log.open("ab") as log, trio.CancelScope(shield=True):
            self.process = await trio.lowlevel.open_process(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
            )
        self.starts += 1
        self.started_at = time.time()
        self.struck = False

    async def keep(self, pause, before_restart=None) -> None:
        """Until told to end: start, wait, start again. `pause()` is the supervisor's, in seconds."""
        try:
            while True:
                await self.start()
                code = await self.process.wait()
                if not self.struck:
                    if self.ending and code == 0:
                        return
                    self.own_ends.append(f"{self.name} ended by itself with {code}: {last_line(self.log)}")
                    if self.given_up:
                        return
                await trio.sleep(pause())
                if before_restart is not None:
                    before_restart()
        finally:
            self.ended.set()


class Processes:
    """All daemons of one run. `wrong` gathers what was seen that must not be."""

    def __init__(self):
        self.daemons: dict[str, Daemon] = {}
        self.wrong: list[str] = []
        self._adopted_seen: dict[int, float] = {}

    def helper(self, target: str) -> int | None:
        """The process of a target such as `node-1`, `node-1/engine`, `coordinator/scorer`; None when there is none."""
        name, _, helper = target.partition("/")
        pid = self.daemons[name].pid if name in self.daemons else None
        if pid is None or not helper:
            return pid
        return next((child for child in children_of(pid) if HELPERS[helper] in words_of(child)), None)

    def strike(self, target: str) -> bool:
        """`kill -9`. False when there was nothing to kill."""
        pid = self.helper(target)
        if pid is None:
            return False
        if "/" not in target:
            self.daemons[target].struck = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    async def watch_orphans(self) -> None:
        """For ever: reap what was adopted; what lives on without its daemon is wrong."""
        while True:
            self.look_for_orphans(trio.current_time())
            await trio.sleep(LOOK_SECONDS * 10)

    def look_for_orphans(self, now: float) -> list[int]:
        own = {daemon.process.pid for daemon in self.daemons.values() if daemon.process is not None}
        living = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or (pid := int(entry.name)) in own:
                continue
            stat = stat_of(pid)
            if stat is None or stat[1] != os.getpid():
                continue
            if stat[0] == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                self._adopted_seen.pop(pid, None)
                continue
            living.append(pid)
            since = self._adopted_seen.setdefault(pid, now)
            if now - since > GONE_SECONDS:
                self.wrong.append(f"left without its daemon for {GONE_SECONDS:.0f} s: {words_of(pid)[:200]}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return living

    async def stop(self, names) -> None:
        """SIGTERM, and a clean end within a bound; else it is wrong, and they are killed."""
        daemons = [self.daemons[name] for name in names if name in self.daemons]
        for daemon in daemons:
            daemon.ending = True
            if daemon.pid is not None:
                daemon.process.terminate()
        with trio.move_on_after(STOP_SECONDS):
            for daemon in daemons:
                await daemon.ended.wait()
        for daemon in daemons:
            if daemon.pid is not None:
                self.wrong.append(f"{daemon.name} did not end within {STOP_SECONDS:.0f} s of SIGTERM")
                daemon.struck = True
                daemon.process.kill()

    async def sweep(self) -> None:
        """The last look: nothing may be left. What is left is wrong, and killed."""
        with trio.move_on_after(GONE_SECONDS):
            while self.look_for_orphans(trio.current_time()):  # noqa: ASYNC110
                await trio.sleep(LOOK_SECONDS)
        for daemon in self.daemons.values():
            if daemon.pid is not None:
                daemon.process.kill()
                await daemon.process.wait()
        for pid in self.look_for_orphans(trio.current_time()):
            self.wrong.append(f"left behind: {words_of(pid)[:200]}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wrong += [end for daemon in self.daemons.values() for end in daemon.own_ends]
