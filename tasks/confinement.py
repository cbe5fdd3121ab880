"""What a scorer's process gives up before it reads its first response. Linux does most of it; elsewhere less holds.

Best effort by layers, each reported by name so that status can say what protects this machine:

| layer     | when           | takes away                                                                        |
|-----------|----------------|-----------------------------------------------------------------------------------|
| parent    | before loading | the process outliving its parent                                                  |
| rlimits   | before loading | memory, CPU time, writing files, core dumps                                       |
| namespace | before loading | every network interface                                                           |
| group     | before loading | leaving the group of processes that its parent kills                               |
| seccomp   | once loaded    | opening files, sockets, new processes and threads, signals, changing any of this  |

Loading a task imports its libraries and, for a person's own file, runs that file. `bubblewrap` is one layer more, set
up around the process by its parent.

It protects the machine and its keys. It does not make a scorer that evaluates its response honest: whoever takes over
the process can still choose the rewards of what is scored in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import signal
import struct
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows has none; this module is imported there all the same
    resource = None

ADDRESS_SPACE_BYTES_MAX = 2 << 30
"""Python with a symbolic algebra system needs a few hundred MiB; a runaway allocation stops here, not in swap."""

CPU_SECONDS_MAX = 1200
"""For the life of one process, which its parent retires far earlier: catches a loop whose parent is gone."""

OPEN_FILES_MAX = 16

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_REFUSE = 0x00050000 | 1  # SECCOMP_RET_ERRNO with EPERM: the scorer sees PermissionError and its process lives
_X32_BIT = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    # name: number on x86_64, on aarch64
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "open_by_handle_at": (304, 265),
    "creat": (85, None),
    "truncate": (76, 45),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "memfd_create": (319, 279),
    "mount": (165, 40),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "mq_open": (240, 180),
}


_LEAVING: dict[str, tuple[int | None, int | None]] = {"setsid": (112, 157), "setpgid": (109, 154)}


def confine_before_loading() -> tuple[str, ...]:
    """Give up what loading a task never needs; names of the layers that took hold. For good: there is no way back."""
    layers = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
            layers.append("parent")
        # A user namespace of its own is how an unprivileged process gets the right to drop its network.
        if libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
            layers.append("namespace")
        if _forbid_calls(libc, _LEAVING):
            layers.append("group")
    if resource is not None:
        for name, limit in _RLIMITS.items():
            _limit(name, limit)
        layers.append("rlimits")
    return tuple(layers)


def confine() -> tuple[str, ...]:
    """Give up the rest; names of the layers that took hold. Whatever a scorer imports must be imported before this."""
    _limit("RLIMIT_NPROC", 0)  # not earlier: a library may start a thread as it is imported
    if sys.platform == "linux" and _forbid_calls(ctypes.CDLL(None, use_errno=True), _FORBIDDEN):
        return ("seccomp",)
    return ()


_RLIMITS = {
    "RLIMIT_AS": ADDRESS_SPACE_BYTES_MAX,
    "RLIMIT_CPU": CPU_SECONDS_MAX,
    "RLIMIT_FSIZE": 0,
    "RLIMIT_CORE": 0,
    "RLIMIT_NOFILE": OPEN_FILES_MAX,
}


def _limit(name: str, limit: int) -> None:
    if resource is not None and hasattr(resource, name):
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some of them
            resource.setrlimit(getattr(resource, name), (limit, limit))


def _forbid_calls(libc: ctypes.CDLL, calls: Mapping[str, tuple[int | None, int | None]]) -> bool:
    program = _filter(platform.machine(), calls)
    if not program or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0) == 0)


def _filter(machine: str, calls: Mapping[str, tuple[int | None, int | None]] = _FORBIDDEN) -> bytes:
    """The BPF program for this architecture, or nothing where the numbers are not known."""
    architecture = _ARCHITECTURES.get(machine)
    if architecture is None:
        return b""
    column = list(_ARCHITECTURES).index(machine)
    numbers = [row[column] for row in calls.values()]
    refused = [number for number in numbers if number is not None]
    steps = [
        _step(_LOAD_WORD, 4),  # seccomp_data.arch
        _step(_JUMP_EQUAL, architecture, yes=1),
        _step(_RETURN, _KILL_PROCESS),  # 32-bit calls have other numbers: a way around everything below
        _step(_LOAD_WORD, 0),  # seccomp_data.nr
        _step(_JUMP_AT_LEAST, _X32_BIT, yes=len(refused) + 1),
        *(_step(_JUMP_EQUAL, number, yes=len(refused) - place) for place, number in enumerate(refused)),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _REFUSE),
    ]
    return b"".join(steps)


def _step(code: int, value: int, *, yes: int = 0) -> bytes:
    """struct sock_filter: `yes` is how many steps to skip when the comparison holds."""
    return struct.pack("=HBBI", code, yes, 0, value)
