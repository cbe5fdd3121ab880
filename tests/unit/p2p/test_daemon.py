from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys

import pytest
import trio

from echo2.p2p.daemon import (
    JsonLines,
    SaidSeldom,
    is_in_use,
    keep_private,
    lock_state_dir,
    read_status,
    run_cli,
    run_daemon,
    stoppable,
    write_status,
)
from echo2.p2p.errors import ConfigurationError, Unreachable


def test_second_start_is_refused(tmp_path):
    """A state folder in use by another process gives one line with its pid."""
    code = (
        "import sys, pathlib; from echo2.p2p.daemon import *; "
        "run_cli(lambda: lock_state_dir(pathlib.Path(sys.argv[1])).__enter__())"
    )
    with lock_state_dir(tmp_path / "state"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "state")], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: another process (pid {os.getpid()}) already uses {tmp_path / 'state'}; "
        "stop it first, or choose another folder\n"
    )


def test_lock_is_free_after_the_holder_ends(tmp_path):
    """The lock goes with its holder; the file that stays behind stops nobody."""
    with lock_state_dir(tmp_path):
        pass
    with lock_state_dir(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_made(tmp_path):
    """A state folder under a file is the user's mistake, said in one line."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot write to the folder"), lock_state_dir(tmp_path / "file" / "x"):
        pass


def refused_start(folder, before):
    code = f"import pathlib; from echo2.p2p.daemon import *\n{before}\n"
    code += f"run_cli(lambda: lock_state_dir(pathlib.Path({str(folder)!r})).__enter__())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_disk_that_takes_no_byte(tmp_path):
    """A full disk at the start is one line and exit 2, also when the lock's file is closed again."""
    done = refused_start(tmp_path, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
    assert (done.returncode, done.stderr) == (2, f"error: cannot write to the folder {tmp_path}: File too large\n")


def test_a_file_system_without_locks_is_not_another_process(tmp_path):
    """What the system says of the lock is passed on; nobody is told to stop a process that does not exist."""
    before = "import fcntl, errno, os\ndef flock(*_): raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))\n"
    done = refused_start(tmp_path, before + "fcntl.flock = flock")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot lock {tmp_path / 'lock'}: No locks available; put the folder on")


def test_whoever_only_looks_at_the_lock_stops_nobody(tmp_path, monkeypatch):
    """The start looks again a moment later; a lock that is held is seen, one that was left behind is not."""
    assert not is_in_use(tmp_path)
    looks = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr("echo2.p2p.daemon._try_lock", lambda _: next(looks))
        with lock_state_dir(tmp_path):
            pass
    with lock_state_dir(tmp_path):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)


def test_a_state_folder_is_its_owners_alone(tmp_path):
    """A folder that is made is closed to others; one the person made stays as it is."""
    with lock_state_dir(tmp_path / "deep" / "state"):
        assert (tmp_path / "deep" / "state").stat().st_mode & 0o777 == 0o700


def test_a_private_file_is_made_or_mended(tmp_path, caplog):
    """Nobody else can read it from its first byte on; one that others could read is mended, with a word."""
    path = tmp_path / "ledger"
    keep_private(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not caplog.text
    (tmp_path / "ledger-wal").touch()
    for file in (path, tmp_path / "ledger-wal"):
        file.chmod(0o644)
    keep_private(path)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    assert caplog.text.count("could be read by others (mode 644)") == 2


def test_status_is_replaced_whole(tmp_path):
    """A reader sees the last status; no temporary file is left."""
    path = tmp_path / "status.json"
    assert read_status(path) is None
    write_status(path, {"state": "a", "path": tmp_path})
    write_status(path, {"state": "b"})
    assert read_status(path) == {"state": "b"}
    assert list(tmp_path.iterdir()) == [path]


def test_status_that_cannot_be_written_stops_nothing(tmp_path):
    """A full disk or a missing folder costs the status, not the daemon."""
    write_status(tmp_path / "gone" / "status.json", {"state": "a"})


def test_status_that_cannot_be_written_is_said_once(tmp_path, caplog):
    """Until it works again, which is said too; or until it fails for another reason."""
    caplog.set_level("INFO")
    path = tmp_path / "gone" / "status.json"
    for _ in range(3):
        write_status(path, {})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (tmp_path / "gone").touch()
    for _ in range(3):
        write_status(path, {})
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    (tmp_path / "gone").unlink()
    (tmp_path / "gone").mkdir()
    for _ in range(3):
        write_status(path, {})
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2 + ["INFO"]
    path.unlink()
    path.mkdir()
    write_status(path, {})
    assert caplog.records[-1].levelname == "WARNING"


def test_half_a_status_reads_as_none(tmp_path):
    """Whatever is in the file, reading it never raises."""
    (tmp_path / "status.json").write_text('{"state": ')
    assert read_status(tmp_path / "status.json") is None


def test_log_lines_are_json():
    """A record is one JSON object with its extra fields, whatever is in the message."""
    record = logging.makeLogRecord(
        {"name": "echo2.x", "levelno": 20, "levelname": "INFO", "msg": "a\nb %s", "args": (1,)}
    )
    record.peer = "12D3"
    line = json.loads(JsonLines("echo2-node").format(record))
    assert line["message"] == "a\nb 1"
    assert line["peer"] == "12D3"
    assert line["daemon"] == "echo2-node"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_end(number):
    """SIGTERM and SIGINT cancel the work, its cleaning up runs, and nothing is raised."""
    ended = []

    async def serve() -> None:
        try:
            signal.raise_signal(number)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
                ended.append(True)

    run_daemon(serve)
    assert ended == [True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_libraries_load_is_a_clean_end_too(number):
    """Status 0, not that of a killed process, and no traceback, even in a library that catches everything."""
    code = (
        "import os, time; from echo2.p2p.daemon import run_cli, stoppable\n"
        "def main():\n"
        "    with stoppable():\n"
        "        print('loading', flush=True)\n"
        "        try: time.sleep(60)\n"
        "        except BaseException: time.sleep(60)\n"
        "run_cli(main)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


def test_signals_are_as_they_were_after_the_start():
    """Whoever calls a daemon's main from its own process keeps its own handlers."""
    before = signal.getsignal(signal.SIGTERM)
    with stoppable():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a process is not told that its parent is gone")
@pytest.mark.parametrize("stuck", [False, True])
def test_a_daemon_ends_with_the_process_it_serves(stuck):
    """Killed with no time to say goodbye, the parent takes its daemons with it, also one whose cleaning up hangs."""
    serve = "await trio.sleep_forever()"
    if stuck:
        serve = f"try: {serve}\n    finally:\n        with trio.CancelScope(shield=True): {serve}"
    daemon = (
        f"import trio; from echo2.p2p import daemon\ndaemon.PARENT_LOOK_SECONDS = daemon.PARENT_GONE_SECONDS = 0.05\n"
        f"async def serve():\n    print('up', flush=True)\n    {serve}\ndaemon.run_daemon(serve)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "environment = os.environ | {'ECHO2_PARENT_PID': str(os.getpid())}\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1]], env=environment)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent, daemon], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout.readline() == b"up\n"
    process.kill()
    assert process.stdout.read() == b""  # ends when the last holder of the pipe has
    process.wait()
    process.stdout.close()


def test_a_daemon_of_its_own_asks_for_no_parent(monkeypatch):
    """A number that is not its parent's ends it; without one it runs as long as it is asked to."""
    ended = []

    async def serve() -> None:
        await trio.sleep(0.05)
        ended.append(True)

    run_daemon(serve)
    monkeypatch.setenv("ECHO2_PARENT_PID", "1" if os.getppid() != 1 else "2")
    run_daemon(trio.sleep_forever)
    assert ended == [True]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigurationError("bad\nkey"), 2, "error: bad key\n"),
        (ExceptionGroup("g", [ExceptionGroup("h", [ConfigurationError("bad")])]), 2, "error: bad\n"),
        (ExceptionGroup("g", [Unreachable("away"), ConfigurationError("bad")]), 2, "error: bad\n"),
        (Unreachable("away"), 1, "error: away\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_for_a_person_are_one_line(capsys, error, code, line):
    """A mistake is one line and exit 2, however deep in nurseries it was raised."""

    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_cli(fail)
    assert caught.value.code == code
    assert capsys.readouterr().err == line


def test_a_bug_keeps_its_traceback():
    """A bug is not dressed up as the user's mistake, even next to one."""

    def fail() -> None:
        raise ExceptionGroup("g", [ConfigurationError("bad"), ZeroDivisionError()])

    with pytest.raises(ExceptionGroup):
        run_cli(fail)


def test_a_process_out_of_files_says_so_once_in_ten_seconds():
    """What trio logs ten times a second comes without a traceback, and with the count of what was left unsaid."""
    seldom = SaidSeldom()
    said = []
    for tenth in range(250):
        values = {"msg": "accept returned %s", "args": ("EMFILE",), "exc_info": (1, 2, 3), "levelno": logging.ERROR}
        record = logging.makeLogRecord(values)
        record.created = 1e9 + tenth / 10
        if seldom.filter(record):
            said.append((record.getMessage(), record.exc_info))
    often = "accept returned EMFILE (and 99 times since last said)"
    assert said == [("accept returned EMFILE", None), (often, None), (often, None)]


def test_a_defect_keeps_its_traceback_and_what_is_no_complaint_is_always_said():
    """Of a defect that strangers can ask for; lines for whoever looks closely take nobody's turn."""
    seldom = SaidSeldom(tracebacks=True)

    def said(level):
        return seldom.filter(logging.makeLogRecord({"levelno": level, "exc_info": (1, 2, 3), "created": 1e9}))

    assert [said(logging.DEBUG), said(logging.ERROR), said(logging.ERROR), said(logging.DEBUG)] == [1, 1, 0, 1]
    record = logging.makeLogRecord({"levelno": logging.ERROR, "exc_info": (1, 2, 3), "created": 1e9 + 20})
    assert seldom.filter(record)
    assert record.exc_info == (1, 2, 3)
