"""A private PostgreSQL server: in a temporary folder, reached over a socket in it, never over TCP."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIBC = ctypes.CDLL(None)
"""Loaded now: the child that needs it is another user by then, and may not be able to read it."""

START_SECONDS = 30.0
USER = "echo2"


def programs() -> Path | None:
    """The folder of the server's programs; None where there are none (Debian keeps them off the PATH)."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    found = shutil.which("postgres")
    folders += [Path(found).parent] if found else []
    return next(
        (folder for folder in folders if all((folder / name).exists() for name in ("initdb", "postgres"))), None
    )


class Server:
    """One server. `start` may follow `kill`: the data are the same."""

    def __init__(self, bin_dir: Path) -> None:
        self.bin_dir = bin_dir
        # Not under TMPDIR: a socket's path has at most 107 bytes, and another user than ours must come to it.
        self.folder = Path(tempfile.mkdtemp(prefix="echo2-pg-", dir="/tmp"))
        self.process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._shared: str | None = None
        self._user: dict[str, int | list[int]] = {}
        if os.geteuid() == 0:
            self._user = _unprivileged()
            os.chown(self.folder, self._user["user"], self._user["group"])
        data = self.folder / "data"
        self._call("initdb", "-D", data, "-A", "trust", "-U", USER, "-E", "UTF8", "--locale=C", "--no-sync")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["-c", "listen_addresses=", "-c", "max_connections=30", "-c", "shared_buffers=16MB"]
        options += ["-c", "recovery_init_sync_method=syncfs"] if sys.platform == "linux" else []
        command = [self.bin_dir / "postgres", "-D", self.folder / "data", "-k", self.folder, *options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, **self._user, preexec_fn=_end_with_us
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(Exception):
                self.execute("SELECT 1")
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            time.sleep(0.02)

    def kill(self) -> None:
        """`kill -9` of the server and of all that it started."""
        assert self.process is not None
        backends = _backends(self.process.pid)  # each is in a session of its own, and would live on for a while
        for pid in (self.process.pid, *backends):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it, and remove its folder: in no order, for nothing of it is kept."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def database(self) -> str:
        """The URL of a new, empty database."""
        self._databases += 1
        name = f"test{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def emptied(self) -> str:
        """The URL of the one database that tests use in turn; a new one takes a hundred times as long."""
        if self._shared is None:
            self._shared = self.database()
        else:
            self.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public", self._shared.split("/")[3].split("?")[0])
        return self._shared

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://{USER}@/{name}?host={self.folder}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """As the superuser."""
        import psycopg

        with psycopg.connect(host=str(self.folder), user=USER, dbname=database, autocommit=True) as connection:
            done = connection.execute(statement)
            return done.fetchall() if done.description else []

    def _call(self, name: str, *arguments: object) -> None:
        command = [str(self.bin_dir / name), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, cwd=self.folder, check=False, **self._user)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())


def _end_with_us() -> None:
    """Of a server: tests that are killed must not leave it behind. It is Linux that can tell it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        LIBC.prctl(pr_set_pdeathsig, signal.SIGQUIT)


def _unprivileged() -> dict[str, int | list[int]]:
    """The server refuses to run as root."""
    import pwd

    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise RuntimeError(f"{sys.platform}: no user to run PostgreSQL as")


def _backends(server: int) -> list[int]:
    """What the server has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == server:
                found.append(int(entry.name))
    return found
