from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from echo2.coordinator import demo_process
from echo2.coordinator.demo_process import ChildFailed, Children, last_line

PY = [sys.executable, "-c"]
SLEEPER = [*PY, "import time\nprint('up', flush=True)\ntime.sleep(60)"]
STUBBORN = [
    *PY,
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)",
]
PARENT_CODE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print(child.pid, flush=True)
time.sleep(60)
"""
PARENT = [*PY, PARENT_CODE]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] == "Z"


async def until(condition, seconds=20):
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - other processes ring no bell of ours
            await trio.sleep(0.02)


async def test_finish_returns_what_the_command_printed(tmp_path):
    """A command that ends well gives back its stdout; its stderr goes to the log."""
    children = Children([].append)
    code = "import sys; print('peer'); print('noise', file=sys.stderr)"
    assert await children.finish("x", [*PY, code], tmp_path / "x.log", seconds=30) == "peer\n"
    assert last_line(tmp_path / "x.log") == "noise"


async def test_finish_says_why_a_command_failed(tmp_path):
    """A command that fails gives its own last line as the reason."""
    children = Children([].append)
    with pytest.raises(ChildFailed, match="x ended with exit code 3: no such model"):
        await children.finish("x", [*PY, "import sys; print('error: no such model', file=sys.stderr); sys.exit(3)"],
                              tmp_path / "x.log", seconds=30)  # fmt: skip


async def test_a_killed_daemon_is_restarted_and_it_is_told(tmp_path, monkeypatch, nursery):
    """A daemon that dies comes back after a pause, and the person hears of it."""
    monkeypatch.setattr(demo_process, "RESTART_SECONDS", 0.05)
    told = []
    children = Children(told.append)
    nursery.start_soon(partial(children.keep, "d", SLEEPER, tmp_path / "d.log"))
    await until(lambda: last_line(tmp_path / "d.log") == "up")
    first = children["d"].process.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: children.restarts["d"] == 1 and children["d"].process.pid != first)
    await children.stop_all()
    assert not children.running("d")
    assert "d was killed by SIGKILL; restart 1 of 3" in told[0]


async def test_restarts_are_bounded(tmp_path, monkeypatch):
    """A daemon that cannot run is given up after three restarts, with its last line as the reason."""
    monkeypatch.setattr(demo_process, "RESTART_SECONDS", 0.01)
    children = Children([].append)
    with pytest.raises(ChildFailed, match="d ended with exit code 1: broken"):
        await children.keep("d", [*PY, "import sys; print('broken'); sys.exit(1)"], tmp_path / "d.log")
    assert children.restarts == {"d": 3}


async def test_wrong_settings_are_not_restarted(tmp_path):
    """Exit code 2 is final: the same settings would be wrong again."""
    children = Children([].append)
    with pytest.raises(ChildFailed, match="exit code 2"):
        await children.keep("d", [*PY, "import sys; sys.exit(2)"], tmp_path / "d.log")
    assert children.restarts == {"d": 0}


async def test_who_ignores_sigterm_is_killed(tmp_path, monkeypatch, nursery):
    """A child that will not stop is killed after the bound, and it is said."""
    monkeypatch.setattr(demo_process, "STOP_SECONDS", 0.2)
    told = []
    children = Children(told.append)
    nursery.start_soon(partial(children.keep, "d", STUBBORN, tmp_path / "d.log"))
    await until(lambda: last_line(tmp_path / "d.log") == "up")
    await children.stop_all()
    assert not children.running("d")
    assert "was killed" in told[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process groups are looked at through /proc")
async def test_helpers_of_a_child_end_with_it(tmp_path, nursery):
    """What a child started and left behind when it was killed is ended too."""
    children = Children([].append)
    nursery.start_soon(partial(children.keep, "d", PARENT, tmp_path / "d.log"))
    await until(lambda: last_line(tmp_path / "d.log").isdigit())
    helper = int(last_line(tmp_path / "d.log"))
    await children.stop_all()
    await until(lambda: gone(helper))


async def test_no_keys_in_the_environment():
    """A child's environment is ours plus thread limits and whose child it is: no key, no token."""
    added = demo_process.child_environment().items() - os.environ.items()
    assert {value for _, value in added} <= {"1", "false", str(os.getpid())}
