"""A demo as a person starts it, driven from outside: processes found by their lock files, files read at the end."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import trio

LOOK_SECONDS = 0.1

PROCESSES = {"coordinator": "coordinator/state", "learner": "learner/home"}


class DemoRun:
    """One `echo2 demo` in a subprocess. Use `async with`; nothing outlives the block."""

    def __init__(self, out: Path, *arguments: str):
        self.out = out
        self.work = out / "work"
        self._arguments = arguments

    async def __aenter__(self):
        echo2 = Path(sys.executable).with_name("echo2")
        self._stdout = (self.out.parent / f"{self.out.name}.stdout").open("w+b")
        self._stderr = (self.out.parent / f"{self.out.name}.stderr").open("w+b")
        self.process = await trio.lowlevel.open_process(
            [str(echo2), "demo", "--json", "--out", str(self.out), *self._arguments],
            stdout=self._stdout,
            stderr=self._stderr,
            stdin=subprocess.DEVNULL,
        )
        return self

    async def __aexit__(self, *error):
        with trio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.terminate()
                with trio.move_on_after(40):
                    await self.process.wait()
                if self.process.returncode is None:
                    self.process.kill()
        self._stdout.close()
        self._stderr.close()

    def home(self, name: str) -> Path:
        return self.work / PROCESSES.get(name, name)

    def pid(self, name: str) -> int:
        return int((self.home(name) / "lock").read_text().split()[0])

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def status(self, name: str) -> dict:
        try:
            return json.loads((self.home(name) / "status.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    async def until(self, holds, what: str, *, seconds: float = 240.0) -> None:
        """Wait for `holds()`; fails with what was waited for, and the demo's last words."""
        with trio.move_on_after(seconds):
            while not holds():
                assert self.process.returncode is None, f"the demo ended before {what}: {self.words()}"
                await trio.sleep(LOOK_SECONDS)
            return
        raise AssertionError(f"{what} did not come within {seconds} s: {self.words()}")

    async def until_version(self, version: int) -> None:
        await self.until(lambda: (self.status("learner").get("version") or 0) >= version, f"version {version}")

    async def end(self, *, seconds: float = 400.0) -> dict:
        """Wait for the demo's end and return its last line. Fails unless it says success."""
        with trio.fail_after(seconds):
            code = await self.process.wait()
        self._stdout.seek(0)
        printed = self._stdout.read().decode().splitlines()
        assert code == 0, f"exit code {code}: {printed[-1:]} {self.words()}"
        return json.loads(printed[-1])

    def words(self) -> str:
        return (self.out.parent / f"{self.out.name}.stderr").read_text(errors="replace")[-2000:]

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def ledger(self, query: str) -> list[tuple]:
        with sqlite3.connect(self.home("coordinator") / "ledger.sqlite3") as connection:
            return connection.execute(query).fetchall()

    def acknowledged(self, node: str) -> set[bytes]:
        """Leases whose slices the node was told are safe."""
        with sqlite3.connect(self.home(node) / "spool.sqlite") as connection:
            return {row[0] for row in connection.execute("SELECT lease_id FROM slice WHERE record IS NULL")}
