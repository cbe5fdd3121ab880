"""A wall around the scorer's process from its very start, where the machine has the program `bwrap`.

The confinement that the worker puts on itself (`confinement`) holds while responses are scored, but a person's own task
file runs before that, to be loaded. Under bubblewrap it sees a read-only machine that holds the system's programs,
Python and the file's own folder: no home, no keys, no network, no other processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TRY_SECONDS_MAX = 10.0

KEY_PATTERNS = ("*.key", "*.pem", "id_*", ".ssh", ".env", ".netrc", ".aws", ".config")
"""A folder with one of these at its top is not shown whole: somebody keeps secrets in it."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/alternatives", "/etc/ld.so.cache")

_WALL = (
    *("bwrap", "--die-with-parent", "--new-session", "--unshare-all", "--cap-drop", "ALL"),
    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),  # noqa: S108  # a new, empty one inside the wall
)


@lru_cache(maxsize=1)
def missing() -> str:
    """Why no process can be put under bubblewrap here, fit to show a person; nothing when it can."""
    if sys.platform != "linux":
        return "bubblewrap is for Linux only"
    if shutil.which("bwrap") is None:
        return "the program bwrap is not installed (package: bubblewrap)"
    try:
        tried = subprocess.run(  # noqa: S603  # our own command
            wrapped([sys.executable, "-I", "-S", "-c", ""], ()),
            capture_output=True,
            timeout=TRY_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not work here: {error}"
    if tried.returncode != 0:
        said = tried.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {tried.returncode}"]
        return f"bwrap does not work here: {said[-1][:200]}"
    return ""


def wrapped(command: Sequence[str], visible: Iterable[Path]) -> list[str]:
    """`command`, to run where only the system, Python, this package and the paths `visible` are to be seen."""
    binds: list[str] = []
    for path in dict.fromkeys([*map(Path, _SYSTEM), *_python(), *visible]):
        if path.is_symlink() and path.parent == Path("/"):  # /bin -> usr/bin on most systems
            binds += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            binds += ["--ro-bind", str(path), str(path)]
    return [*_WALL, *binds, "--remount-ro", "/", "--chdir", "/", "--", *command]


def folder_shown(file: Path) -> Path:
    """What is shown of the place where a person's task file lies: its folder, or the file alone where secrets may lie.

    Those are a home, whatever a home lies in, and a folder that holds what looks like a key.
    """
    folder = file.parent
    home = Path.home()
    shared = folder == home or folder in home.parents or folder in map(Path, ("/tmp", "/var/tmp", "/dev/shm"))  # noqa: S108
    if shared or any(next(folder.glob(p), None) for p in KEY_PATTERNS):
        return file
    return folder


def _python() -> list[Path]:
    """Everything that an interpreter like this one imports from."""
    places = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent]
    package = Path(__file__)
    places += [package.parent, package.resolve().parent]
    namespace = sys.modules[__name__.partition(".")[0]].__file__
    if namespace is not None:
        places += [Path(namespace).parent]
    return places + [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
