"""The owner's commands, and what the command line prints."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from echo2.node.commands import HOME_DEFAULT, FileCommands, command_line
from echo2.node.main import app
from echo2.p2p.daemon import lock_state_dir
from echo2.p2p.errors import ConfigurationError


def test_a_command_outlives_the_process(tmp_path):
    """What was written is read by the next process; nothing written means run."""
    assert FileCommands(tmp_path).read() == "run"
    for command in ("pause", "finish", "run"):
        FileCommands(tmp_path).write(command)
        assert FileCommands(tmp_path).read() == command


def test_a_word_that_is_no_command_counts_as_pause(tmp_path):
    """A damaged file never makes a machine work that its owner had paused."""
    (tmp_path / "command").write_bytes(b"\xff\x00 pau")
    assert FileCommands(tmp_path).read() == "pause"


def test_a_home_that_cannot_be_written_is_one_clear_error(tmp_path):
    """Not a traceback."""
    with pytest.raises(ConfigurationError, match="cannot write"):
        FileCommands(tmp_path / "none").write("pause")


def test_pause_resume_finish_from_the_command_line(tmp_path):
    """Each writes its word into the home and says what comes next."""
    for command, word in (("pause", "pause"), ("finish", "finish"), ("resume", "run")):
        done = CliRunner().invoke(app, [command, "--home", str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert FileCommands(tmp_path).read() == word


def test_what_to_type_next_names_the_home_unless_it_is_the_default_one(tmp_path, monkeypatch):
    """As it is right in any folder of the shell."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "n 1"
    home.mkdir()
    done = CliRunner().invoke(app, ["pause", "--home", "n 1"])
    assert done.stdout == f"paused; go on with `echo2-node resume --home '{home}'`\n"
    assert f"`echo2-node run --home '{home}'`" in str(CliRunner().invoke(app, ["status", "--home", "n 1"]).exception)
    assert FileCommands(HOME_DEFAULT).line("finish") == "echo2-node finish"
    assert command_line("resume", HOME_DEFAULT.expanduser()) == "echo2-node resume"


def test_status_prints_a_table_and_says_when_the_node_is_gone(tmp_path):
    """Fields another version did not write are left out; --json gives everything."""
    status = {"name": "n1", "peer": "12D3", "state": "working", "run": "demo", "version": 4, "receipts": {"stale": 2}}
    (tmp_path / "status.json").write_text(json.dumps(status))

    def shown(*options):
        return CliRunner().invoke(app, ["status", "--home", str(tmp_path), *options]).output

    assert "not running" in shown()
    with lock_state_dir(tmp_path):
        assert "working" in shown()
        assert "2 stale" in shown()
        assert "running" not in shown()
        assert json.loads(shown("--json"))["running"] is True
        os.utime(tmp_path / "status.json", (0, 0))
        assert "not running" not in shown()
        assert "its status is" in shown()  # its disk may be full: it lives all the same
    assert "not running" in shown()
