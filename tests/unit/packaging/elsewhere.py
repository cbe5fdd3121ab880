"""Imports every module as another system would have it: `python elsewhere.py darwin|win32`. Prints what it imported.

Libraries are loaded first, under the system that this is; then what only Linux has is taken away, and our modules are
imported anew. At last the few calls are made that a node makes on every system.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import socket
import sys
from types import SimpleNamespace

PACKAGES = ("tasks", "p2p", "node", "coordinator")
ENGINES = {"echo2.node.llama_engine", "echo2.tasks.scorer_worker"}
"""Need the engine's library; is a program, not a module."""

LEARNER = ("buffer", "config", "link", "main", "outbox", "publisher", "service", "status")
"""Those that load no torch."""

MISSING = {
    "darwin": {
        "socket": ("TCP_INFO", "SO_MAX_PACING_RATE", "SO_INCOMING_CPU", "SO_BINDTODEVICE", "TCP_USER_TIMEOUT"),
        "os": (
            "sched_getaffinity",
            "pidfd_open",
            "memfd_create",
            "posix_fallocate",
            "posix_fadvise",
            "copy_file_range",
        ),
        "modules": ("msvcrt", "winreg", "_winapi"),
    },
    "win32": {
        "socket": (
            *("TCP_INFO", "SO_MAX_PACING_RATE", "SO_INCOMING_CPU", "SO_BINDTODEVICE", "TCP_USER_TIMEOUT"),
            *("AF_UNIX", "SO_REUSEPORT", "TCP_NOTSENT_LOWAT", "TCP_CORK", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
        ),
        "os": (
            *("sched_getaffinity", "pidfd_open", "memfd_create", "posix_fallocate", "posix_fadvise", "copy_file_range"),
            *("fork", "setsid", "killpg", "getpgid", "getuid", "geteuid", "getgid", "fchmod", "chown", "fchown"),
            *("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "sysconf", "statvfs", "mkfifo", "nice"),
            *("preadv", "pwritev", "pread", "pwrite"),
        ),
        "signal": ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE", "SIGALRM"),
        "modules": ("fcntl", "resource", "termios", "pwd", "grp"),
    },
}


def names() -> list[str]:
    found = [f"echo2.learner.{name}" for name in LEARNER]
    for package in PACKAGES:
        path = importlib.import_module(f"echo2.{package}").__path__
        found += [f"echo2.{package}.{each.name}" for each in pkgutil.iter_modules(path)]
    return [name for name in found if name not in ENGINES]


def become(system: str) -> None:
    missing = MISSING[system]
    for module in (socket, os, signal):
        for name in missing.get(module.__name__, ()):
            if hasattr(module, name):
                delattr(module, name)
    for name in missing["modules"]:
        sys.modules[name] = None  # type: ignore[assignment]  # how import is told that there is none
    for name in [name for name in sys.modules if name.split(".")[0] == "echo2"]:
        del sys.modules[name]
    sys.platform = system


def use() -> None:
    """What a node does at its start and on each connection, as far as it touches the system."""
    line = importlib.import_module("echo2.p2p.line")
    tcp = importlib.import_module("echo2.p2p.libp2p_tcp")
    punch = importlib.import_module("echo2.p2p.hole_punch")
    with socket.socket() as one:
        assert line.read_line(one) is None
        line.set_pace(one, 1000.0)
        tcp._tune(one, SimpleNamespace(bits_per_second=1e6))
        if not hasattr(socket, "SO_REUSEPORT"):
            assert punch.share_port(one) is False


if __name__ == "__main__":
    wanted = names()
    for name in wanted:
        importlib.import_module(name)
    become(sys.argv[1])
    for name in wanted:
        importlib.import_module(name)
    use()
    print(*wanted, sep="\n")
