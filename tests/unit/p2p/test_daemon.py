from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys

import pytest
import trio

from echo2.p2p.daemon import JsonLines, lock_state_dir, read_status, run_cli, run_daemon, write_status
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
