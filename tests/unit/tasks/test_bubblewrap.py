"""What a wrapped process sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echo2.tasks import bubblewrap
from echo2.tasks.bubblewrap import folder_shown, missing, wrapped


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "people" / "ada"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_the_folder_of_a_task_file_is_shown_unless_secrets_may_lie_there(home):
    """A home, what a home lies in, and a folder with keys show the file alone."""
    assert folder_shown(home / "work" / "task.py") == home / "work"
    assert folder_shown(home / "task.py") == home / "task.py"
    assert folder_shown(home.parent / "task.py") == home.parent / "task.py"
    assert folder_shown(Path("/tmp/task.py")) == Path("/tmp/task.py")
    (home / "work" / "identity.key").touch()
    assert folder_shown(home / "work" / "task.py") == home / "work" / "task.py"


def test_a_machine_without_the_program_says_so(monkeypatch):
    """With the name of the package."""
    missing.cache_clear()
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda _name: None)
    if sys.platform == "linux":
        assert missing() == "the program bwrap is not installed (package: bubblewrap)"
    missing.cache_clear()
    monkeypatch.setattr(bubblewrap.sys, "platform", "darwin")
    assert missing() == "bubblewrap is for Linux only"
    monkeypatch.undo()
    missing.cache_clear()


def test_a_wrapped_process_sees_no_home_no_key_no_network_and_no_other_process(home):
    """It can import this package and read what it is shown; it can write nowhere but in its own empty /tmp."""
    if missing():
        pytest.skip(missing())
    (home / "work" / "task.py").write_text("here")
    (home / "secret").write_text("key")
    program = f"""
import os, socket
from pathlib import Path
import echo2.tasks.scorer_worker
assert Path({str(home / "work" / "task.py")!r}).read_text() == "here"
assert not Path({str(home / "secret")!r}).exists()
assert not Path("/etc/passwd").exists() and not Path("/var").exists()
for place in ({str(home / "work")!r}, "/", "/usr", "/etc"):
    try:
        Path(place, "written").write_text("x")
    except OSError:
        continue
    raise AssertionError(place)
assert [n for n in os.listdir("/proc") if n.isdigit()] in (["1", "2"], ["1"]), os.listdir("/proc")
assert [name for _, name in socket.if_nameindex()] in (["lo"], [])
"""
    done = subprocess.run(
        wrapped([sys.executable, "-s", "-P", "-B", "-c", program], [home / "work"]), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
