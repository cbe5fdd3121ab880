"""What people get wrong, on the real commands: one line that says what to do, exit 2, never a traceback."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from echo2.p2p.identity import Identity
from echo2.p2p.join import parse_join_string
from echo2.tasks.model_card import ModelCard, tokenizer_sha256, write_model_card

pytestmark = pytest.mark.e2e

LEARNER = Identity(b"\x07" * 32).peer_id
SECONDS = 60
"""Bound on any one command here; loading libp2p takes most of what they need."""

BEHIND = '[rest]\nbehind_proxy = true\nproxy_address = "127.0.0.1"'
"""Off loopback REST needs TLS, its own or a proxy's."""


MODULES = {
    "echo2": "echo2.coordinator.cli",
    "echo2-coordinator": "echo2.coordinator.main",
    "echo2-learner": "echo2.learner.main",
    "echo2-node": "echo2.node.main",
}


def argv(command, *arguments):
    return [sys.executable, "-m", MODULES[command], *map(str, arguments)]


def run(command, *arguments):
    """The command's own entry point, in this process: loading libraries for each of forty mistakes takes minutes."""
    main = importlib.import_module(MODULES[command]).main
    output, errors = io.StringIO(), io.StringIO()
    arguments_before, handlers = sys.argv, logging.getLogger().handlers[:]
    sys.argv = [command, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = arguments_before
        logging.getLogger().handlers[:] = handlers
    return SimpleNamespace(returncode=end.value.code or 0, stdout=output.getvalue(), stderr=errors.getvalue())


def is_mistake(done, says):
    """One line, exit 2, the reason."""
    assert "Traceback" not in done.stderr
    assert done.returncode == 2, (done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == lines[0]
    assert says in lines[0]


def make_pool(folder, **changes):
    """A coordinator that could be served: settings, key, operator's token, model folder. Returns its settings file."""
    done = run("echo2-coordinator", "init", folder)
    assert done.returncode == 0, done.stderr
    model = folder / "model"
    model.mkdir()
    vocabulary = {token: number for number, token in enumerate(["<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.save(str(model / "tokenizer.json"))
    card = ModelCard(
        name="small", architecture="llama", tokenizer_sha256=tokenizer_sha256(model), vocabulary_size=len(vocabulary),
        context_tokens=64, stop_ids=(0,), special_ids=(0,),
    )  # fmt: skip
    write_model_card(model, card)
    settings = {"learner": LEARNER, "rest_port": 0, "listen": "/ip4/127.0.0.1/tcp/0", "task": "arithmetic"} | changes
    path = folder / "coordinator.toml"
    path.write_text(
        f'listen = ["{settings["listen"]}"]\n[rest]\nport = {settings["rest_port"]}\n[run]\nname = "r"\n'
        f'task = "{settings["task"]}"\nmodel_dir = "model"\nlearner = "{settings["learner"]}"\nsteps = 2\n'
    )
    return path


@contextmanager
def serving(settings):
    """A coordinator that answers; gives its status. It must end cleanly on SIGTERM."""
    log = (settings.parent / "log").open("wb")
    process = subprocess.Popen(argv("echo2-coordinator", "serve", "--config", settings), stdout=log, stderr=log)
    status = settings.parent / "state" / "status.json"
    try:
        deadline = time.monotonic() + SECONDS
        while not status.exists():
            assert process.poll() is None, (settings.parent / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield json.loads(status.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, (settings.parent / "log").read_text()
    finally:
        process.kill()
        process.wait()
        log.close()


@contextmanager
def busy_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


def test_init_serve_and_tokens(tmp_path):
    """init, token create, serve and token list work one after the other; the join string dials this coordinator."""
    settings = make_pool(tmp_path / "pool")
    state = tmp_path / "pool" / "state"
    assert (state / "identity.key").stat().st_mode & 0o077 == 0
    peer = run("echo2-coordinator", "identity", "--config", settings).stdout.strip()
    is_mistake(run("echo2-coordinator", "token", "create", "--config", settings), "set announce = [")
    with serving(settings) as status:
        assert status["peer"] == peer
        with urllib.request.urlopen(status["rest"] + "/healthz", timeout=SECONDS) as answer:
            assert json.load(answer)["status"] == "ok"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(status["rest"] + "/v1/tokens", data=b"{}"), timeout=SECONDS)
        assert refused.value.code == 401
        join = parse_join_string(
            run("echo2-coordinator", "token", "create", "--config", settings, "--uses", "3").stdout
        )
        assert (join.peer, join.run, list(join.addresses)) == (peer, "r", status["addresses"])
        is_mistake(run("echo2-coordinator", "serve", "--config", settings), f"(pid {status['pid']}) already uses")
    log = (tmp_path / "pool" / "log").read_text()
    assert f"peer id {peer}, listening on {status['addresses'][0]}, REST on {status['rest']}" in log
    assert "the run r is ready; waiting for: no snapshot published yet" in log
    listed = run("echo2-coordinator", "token", "list", "--config", settings).stdout
    assert listed.splitlines()[1].split()[1:3] == ["0", "3"]
    assert join.token not in listed
    is_mistake(run("echo2-coordinator", "init", tmp_path / "pool"), "is already there; nothing was changed")


def test_busy_ports(tmp_path):
    """A port that another program holds is named, whether it is REST's or libp2p's."""
    with busy_port() as port:
        settings = make_pool(tmp_path / "a", rest_port=port)
        is_mistake(
            run("echo2-coordinator", "serve", "--config", settings), f"cannot serve REST on 127.0.0.1 port {port}"
        )
        settings = make_pool(tmp_path / "b", listen=f"/ip4/127.0.0.1/tcp/{port}")
        is_mistake(run("echo2-coordinator", "serve", "--config", settings), str(port))


def test_coordinator_settings(tmp_path):
    """Missing file, broken TOML, unknown key, unknown task, missing model: each has its own sentence."""
    serve = ("echo2-coordinator", "serve", "--config")
    is_mistake(run(*serve, tmp_path / "none.toml"), "there is no settings file")
    is_mistake(run(*serve, "/dev/zero"), "it is a device or a pipe")
    settings = make_pool(tmp_path / "pool")
    good = settings.read_text()
    for text, says in [
        (good + "R = \n", "is not valid TOML"),
        (good + "reward = 3\n", "unknown key 'run.reward'"),
        (good + "kapa = 3\n", "did you mean 'kappa'?"),
        (good + "R = 20\n", "run.R = 20 must be a multiple of run.n = 8"),
        (good.replace(LEARNER, "me"), 'run.learner = "me": must be the peer id that `echo2-learner identity` prints'),
        (good.replace('"arithmetic"', '"arithmetics"'), "did you mean 'arithmetic'"),
        (good.replace('"model"', '"models"'), "is not a model folder"),
        (good + "x = " + "[" * 20_000, "is not a settings file"),
        ('state_dir = "~nosuchuser9/x"\n' + good, "there is no such user"),
        ('state_dir = "a\\u0000b"\n' + good, "cannot be the name of a file"),
        (good.replace("/ip4/127.0.0.1/", "/ip4/999.1.1.1/"), "999.1.1.1 is not an IPv4 address"),
        (good.replace(LEARNER, LEARNER[:-1] + "4"), "is the peer id of no key"),
        (good.replace("[rest]", '[rest]\nhost = "not.a.name.invalid"'), "is not loopback, and tokens would cross"),
        (good.replace("[rest]", BEHIND + '\nhost = "not.a.name.invalid"'), "is not an address of this machine"),
    ]:
        settings.write_text(text)
        is_mistake(run(*serve, settings), says)


def test_folders_that_cannot_be_used(tmp_path):
    """A file where a folder should be, a key others can read, a lost operator's token: said, not raised."""
    (tmp_path / "file").touch()
    is_mistake(run("echo2-coordinator", "init", tmp_path / "file" / "pool"), "cannot write to the folder")
    settings = make_pool(tmp_path / "pool")
    state = tmp_path / "pool" / "state"
    (state / "operator-token.sha256").unlink()
    is_mistake(run("echo2-coordinator", "serve", "--config", settings), "echo2-coordinator token operator")
    assert run("echo2-coordinator", "token", "operator", "--config", settings).returncode == 0
    (state / "identity.key").chmod(0o644)
    is_mistake(run("echo2-coordinator", "serve", "--config", settings), "chmod 600")
    os.truncate(state / "identity.key", 3)
    (state / "identity.key").chmod(0o600)
    is_mistake(run("echo2-coordinator", "serve", "--config", settings), "is not a key file (3 bytes")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--join", "hello"], "it must start with echo2://"),
        ([], "has not joined a run yet; start it with --join"),
        (["--join", "@/nowhere/join"], "there is no file /nowhere/join"),
        (["--join", "@/dev/zero"], "it is a device or a pipe"),
        (["--join", "@~nosuchuser9/join"], "there is no such user"),
        (
            ["--join", f"echo2://{LEARNER}@1.2.3.4:1/r?token={'t' * 36}", "--name", "\udcff"],
            "error: the command line: ",
        ),
        (["--join", f"echo2://{LEARNER}@1.2.3.4:1/r"], "?token=... is missing at its end"),
        (["--join", f"echo2://{LEARNER}@1.2.3.4:1/r?token={'t' * 36}", "--listen", "4001"], "an address like /ip4/"),
        (["--join", f"echo2://{LEARNER}@1.2.3.4:1/r?token={'t' * 36}", "--threads", "0"], "threads"),
    ],
)
def test_node_mistakes(tmp_path, arguments, says):
    """A join string cut off in the mail, or an option that cannot be: one line."""
    is_mistake(run("echo2-node", "run", "--home", tmp_path / "home", *arguments), says)


def test_node_commands_without_a_node(tmp_path):
    """Asking a node that does not exist names the folder that was looked in."""
    is_mistake(run("echo2-node", "status", "--home", tmp_path / "none"), "there is no node home")
    is_mistake(run("echo2-node", "finish", "--home", tmp_path / "none"), "there is no node home")
    is_mistake(run("echo2-node", "status", "--home", "~nosuchuser9/x"), "there is no such user")


def test_learner_mistakes(tmp_path):
    """The learner says what is wrong with its settings and its model in the same way."""
    is_mistake(run("echo2-learner", "run", "--config", tmp_path / "none.toml"), "there is no settings file")
    settings = tmp_path / "learner.toml"
    settings.write_text('home = "home"\ncoordinator = "nowhere"\nmodel_dir = "model"\nrun = "r"\n')
    is_mistake(run("echo2-learner", "run", "--config", settings), "is neither a join string")
    settings.write_text('home = "home"\nlearning_rate = 1\n')
    is_mistake(run("echo2-learner", "run", "--config", settings), "unknown key 'learning_rate'")


def test_a_learner_told_to_stop_while_torch_loads(tmp_path):
    """It ends with status 0, as documented, however early the signal comes after its folder is locked."""
    model = make_pool(tmp_path / "pool").parent / "model"
    settings = tmp_path / "learner.toml"
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{LEARNER}"
    settings.write_text(f'home = "home"\ncoordinator = "{address}"\nmodel_dir = "{model}"\nrun = "r"\n')
    process = subprocess.Popen(argv("echo2-learner", "run", "--config", settings), stderr=subprocess.PIPE, text=True)
    lock = tmp_path / "home" / "identity.key"
    deadline = time.monotonic() + SECONDS
    while not lock.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_demo_mistakes(tmp_path):
    """The demo touches no folder but its own, and names the models there are."""
    (tmp_path / "thesis.md").write_text("mine")
    is_mistake(run("echo2", "demo", "--out", tmp_path), "choose another folder with --out")
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "lock"] == ["thesis.md"]
    is_mistake(run("echo2", "demo", "--model", "large", "--out", tmp_path / "x"), "choose one of tiny, smollm2")
    is_mistake(run("echo2", "demo", "--S", "1", "--kappa", "5", "--out", tmp_path / "x"), "--kappa 5 must be at most")
    assert not (tmp_path / "x").exists()


def test_wrong_options_are_refused_before_anything_starts():
    """An option that does not exist is exit 2 from every command."""
    for command in ("echo2", "echo2-coordinator", "echo2-node", "echo2-learner"):
        done = subprocess.run(argv(command, "--no-such"), capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "--no-such" in done.stderr
