"""What the learner's process hands to its transport."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from echo2.learner import main
from echo2.learner.config import IDENTITY_FILE, MODEL_DIR_FILE, LearnerConfig
from echo2.learner.prepare import new_folder, tell_loading
from echo2.p2p import libp2p_transport
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.settings import make_settings


async def test_bans_outlive_a_restart(tmp_path, monkeypatch):
    """They are kept in the learner's home."""
    asked = {}

    def opened(*_arguments, **named):
        asked.update(named)
        raise ConfigurationError("far enough")

    monkeypatch.setattr(libp2p_transport, "open_libp2p_transport", opened)
    coordinator = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(b'c' * 32).peer_id}"
    values = {"home": "home", "coordinator": coordinator, "run": "r", "model_dir": "m"}
    config = make_settings(values, LearnerConfig, source="l.toml", folder=tmp_path)
    with pytest.raises(ConfigurationError, match="far enough"):
        await main._serve(config, Identity(b"l" * 32), None, None)
    assert asked["state_dir"] == tmp_path / "home"


def test_a_check_prints_every_setting_and_no_token(tmp_path):
    """What is shown around must not let anyone in; a mistake is told as when the learner starts."""
    coordinator = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(b'c' * 32).peer_id}"
    path = tmp_path / "learner.toml"
    path.write_text(f'home = "h"\ncoordinator = "{coordinator}"\nrun = "r"\nmodel_dir = "m"\n')
    found = json.loads(CliRunner().invoke(main.app, ["check", "--config", str(path)]).stdout)
    assert set(found) == set(LearnerConfig.model_fields)
    assert found["coordinator"] == coordinator
    join = f"echo2://{Identity(b'c' * 32).peer_id}@127.0.0.1:1/r"
    path.write_text(f'home = "h"\ncoordinator = "{join}?token={"s" * 36}"\nmodel_dir = "m"\n')
    shown = CliRunner().invoke(main.app, ["check", "--config", str(path)]).stdout
    assert json.loads(shown)["coordinator"] == join
    assert "s" * 36 not in shown
    assert found["train"]["learning_rate"] == 2e-4
    path.write_text(path.read_text() + "[train]\nlr = 1\n")
    mistake = CliRunner().invoke(main.app, ["check", "--config", str(path)]).exception
    assert isinstance(mistake, ConfigurationError)
    assert "unknown key 'train.lr'" in str(mistake)


def exporting(*arguments):
    """The error of `export-hf`, and whether torch was loaded for it."""
    code = (
        "import sys; from echo2.learner.main import app\n"
        "try: app(sys.argv[1:], standalone_mode=False)\n"
        "except Exception as error: print(error, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "export-hf", *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_wrong_folder_is_told_before_torch_is_loaded(tmp_path):
    """None, one that is no home, the one around the home, one that has not trained, one to write that is in use."""
    out, home = tmp_path / "out", tmp_path / "learner" / "home"
    assert exporting(tmp_path / "learnr", "--out", out) == f"there is no folder {tmp_path / 'learnr'} False"
    home.mkdir(parents=True)
    says = "is no learner's home (it has no checkpoints); HOME is what learner.toml calls `home`"
    assert exporting(home.parent, "--out", out) == f"{home.parent} {says} False"
    (home / IDENTITY_FILE).write_bytes(b"k" * 32)
    assert exporting(home.parent, "--out", out) == f"{home.parent} {says}: here {home} False"
    assert exporting(home, "--out", out).startswith(f"{home} has no checkpoint yet, or is no learner's home; HOME is ")
    (home / MODEL_DIR_FILE).write_text(f"{tmp_path}\n")
    assert exporting(home, "--out", out).startswith(f"the learner in {home} has no checkpoint yet; try again")
    (home / "checkpoints").mkdir()
    assert exporting(home.parent, "--out", out) == f"{home.parent} {says}: here {home} False"
    assert exporting(home, "--out", tmp_path).endswith("is not an empty folder; name another or remove it False")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_long_wait_is_told_to_a_terminal_alone(terminal, monkeypatch, capsys):
    """In a pipe stderr stays for what is wrong."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    tell_loading()
    assert capsys.readouterr().err.startswith("loading torch") == terminal


def test_a_folder_that_sigterm_ends_leaves_nothing(tmp_path):
    """Not the half of it either; the handler that was there is back, and the exit status is a signal's."""
    before = signal.getsignal(signal.SIGTERM)

    def fill():
        with new_folder(tmp_path / "model") as folder:
            (folder / "half").write_text("")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        fill()
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before
