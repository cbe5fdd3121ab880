from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path

import pytest

from echo2.coordinator.config import (
    ActivationConfig,
    AdmissionConfig,
    CoordinatorConfig,
    CreditConfig,
    RestConfig,
    RestPlace,
    RunConfig,
    load_config,
)
from echo2.coordinator.database import read_password
from echo2.coordinator.operator_token import load_operator_token_hash, local_token, make_operator_token
from echo2.coordinator.template import TEMPLATE
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.settings import make_settings

LEARNER = Identity(b"\x05" * 32).peer_id
RUN = {"name": "r", "task": "arithmetic", "model_dir": "model", "learner": LEARNER, "steps": 10}


def make(**run: object) -> CoordinatorConfig:
    return make_settings({"run": RUN | run}, CoordinatorConfig, source="c.toml", folder=Path("/srv/pool"))


def wrong(**run: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make(**run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults():
    """What nobody set is what DESIGN says: S = 3, kappa = S - 1, loopback REST, temperature 1, no filters."""
    config = make()
    run = config.run
    assert (run.S, run.kappa, run.R, run.n) == (3, 2, 256, 8)
    assert (run.temperature, run.top_k, run.top_p, run.min_p) == (1.0, 0, 1.0, 0.0)
    assert config.rest.loopback
    assert run.model_dir == Path("/srv/pool/model")
    assert config.ledger_path == Path("/srv/pool/state/ledger.sqlite3")


@pytest.mark.parametrize(("budget", "kappa"), [(0, 1), (1, 1), (2, 1), (3, 2), (6, 5)])
def test_kappa_follows_s_unless_set(budget, kappa):
    """kappa = S - 1, and never below 1: synchronous is S = 0, kappa = 1."""
    assert make(S=budget).run.kappa == kappa
    assert make(S=budget, kappa=1).run.kappa == 1


def test_rules_over_several_keys():
    """A step is whole groups; a snapshot may not be older than S before the next one comes."""
    assert "run.R = 20 must be a multiple of run.n = 8" in wrong(R=20)
    assert "run.kappa = 5 must be at most S + 1 = 4" in wrong(S=3, kappa=5)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("learner", Identity(b"\x01" * 32).peer_id[:-1] + "3", "this is the peer id of no key; copy it again"),
        ("learner", "PEER_ID", "must be the peer id that `echo2-learner identity` prints"),
        ("n", 0, "run.n = 0: should be greater than or equal to 1"),
        ("temperature", 0, "run.temperature = 0: should be greater than 0"),
        ("top_p", 1.5, "run.top_p = 1.5: should be less than or equal to 1"),
        ("steps", True, "run.steps = true"),
        ("broadcast", "torrent", "should be 'auto', 'star' or 'chain'"),
        ("name", "my run", 'run.name = "my run": must be letters, digits'),
        ("stale", 3, "unknown key 'run.stale'"),
        ("s", 3, "unknown key 'run.s'; did you mean 'S'?"),
    ],
)
def test_each_mistake_names_its_key(key, value, says):
    """A bad value names the key, what was given and what is allowed."""
    assert says in wrong(**{key: value})


def test_a_slice_is_never_larger_than_its_group():
    """With n = 4 a slice has at most 4 samples, whatever slice_samples_max says."""
    assert make(R=8, n=4, slice_samples_max=64).run.slice_samples == 4
    assert make(slice_samples_max=2).run.slice_samples == 2


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)])
def test_loopback(host, loopback):
    """Only the loopback addresses count as this machine alone."""
    assert RestConfig(host=host, certificate="c.pem", key="k.pem").loopback is loopback


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"host": "0.0.0.0"}, "tokens would cross the network in the clear: set rest.certificate and rest.key, or"),
        ({"certificate": "c.pem"}, "rest.certificate and rest.key go together"),
        ({"host": "0.0.0.0", "key": "k.pem"}, "rest.certificate and rest.key go together"),
        ({"behind_proxy": True}, "rest.behind_proxy and rest.proxy_address go together"),
        ({"proxy_address": "10.0.0.1"}, "rest.behind_proxy and rest.proxy_address go together"),
        ({"behind_proxy": True, "proxy_address": "nginx"}, "is not an IP address"),
        (
            {"behind_proxy": True, "proxy_address": "10.0.0.1", "certificate": "c.pem", "key": "k.pem"},
            "exclude each other",
        ),
    ],
)
def test_tokens_never_cross_the_network_in_the_clear(values, says):
    """Off loopback a coordinator without TLS does not start, and says what to set."""
    with pytest.raises(ConfigurationError, match=says):
        make_settings({"rest": values}, RestPlace, source="c.toml")


def test_reading_is_open_to_this_machine_alone():
    """Behind a proxy nobody is known to be of this machine, wherever it listens."""
    proxy = {"behind_proxy": True, "proxy_address": "10.0.0.1"}
    assert RestConfig().open_reads
    assert not RestConfig(**proxy).open_reads
    assert not RestConfig(host="0.0.0.0", **proxy).open_reads
    assert not RestConfig(host="::", certificate="c.pem", key="k.pem").open_reads


def test_the_local_token_is_there_while_the_coordinator_is(tmp_path):
    """A new one each time, readable by the owner alone."""
    path, seen = tmp_path / "state" / "local-token", set()
    for _ in range(2):
        with local_token(path) as local:
            assert local.write() == ""
            token = path.read_text().strip()
            assert hashlib.sha256(token.encode()).digest() == local.digest
            assert path.stat().st_mode & 0o077 == 0
            seen.add(token)
        assert not path.exists()
    assert len(seen) == 2


def test_a_full_disk_keeps_no_coordinator_from_starting(tmp_path, monkeypatch):
    """The local token is written when there is room, and no half of one stays behind; other trouble is said at once."""
    path, fsync = tmp_path / "local-token", os.fsync

    def full(number):
        def fail(_descriptor):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)

    with local_token(path) as local:
        for number in (errno.ENOSPC, errno.EDQUOT):
            full(number)
            assert f"cannot write {path}: {os.strerror(number)}" == local.write()
            assert list(tmp_path.iterdir()) == []
        full(errno.EIO)
        with pytest.raises(ConfigurationError, match="Input/output error"):
            local.write()
        monkeypatch.setattr(os, "fsync", fsync)
        assert local.write() == ""
        assert hashlib.sha256(path.read_text().strip().encode()).digest() == local.digest
    assert list(tmp_path.iterdir()) == []


def test_template_shows_every_key_with_its_default(tmp_path):
    """With every comment taken away, the file that `init` writes is valid and equals the defaults."""
    text = TEMPLATE.replace("PEER_ID", LEARNER)
    (tmp_path / "short.toml").write_text(text)
    (tmp_path / "long.toml").write_text(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    assert load_config(tmp_path / "short.toml") == load_config(tmp_path / "long.toml")
    for model in (CoordinatorConfig, RestConfig, CreditConfig, ActivationConfig, AdmissionConfig, RunConfig):
        for key in model.model_fields:
            if key not in {"rest", "credit", "activation", "admission", "run", "runs"}:
                assert re.search(rf"^(# )?{key} = ", TEMPLATE, flags=re.MULTILINE), key


def test_fresh_template_says_what_to_fill_in(tmp_path):
    """Serving the untouched template names the one key that must be filled in."""
    (tmp_path / "c.toml").write_text(TEMPLATE)
    with pytest.raises(ConfigurationError, match=r'run\.learner = "PEER_ID": must be the peer id'):
        load_config(tmp_path / "c.toml")


def test_the_peer_id_is_told_before_the_settings_are_filled_in(tmp_path):
    """The learner's settings name the coordinator, and the coordinator's the learner: one must be printable first."""
    from typer.testing import CliRunner

    from echo2.coordinator.main import app

    printed = CliRunner().invoke(app, ["init", str(tmp_path / "pool")]).output
    config = tmp_path / "pool" / "coordinator.toml"
    assert "PEER_ID" in config.read_text()
    identity = CliRunner().invoke(app, ["identity", "--config", str(config)])
    assert (identity.exit_code, len(identity.output.strip())) == (0, 52)
    assert identity.output.strip() in printed
    assert CliRunner().invoke(app, ["token", "operator", "--config", str(config)]).exit_code == 0


def test_operator_token_is_kept_as_a_hash(tmp_path):
    """The file holds only the hash, readable by the owner alone, and a new token replaces the old one."""
    path = tmp_path / "state" / "operator-token.sha256"
    first, second = make_operator_token(path), make_operator_token(path)
    assert first != second
    assert second not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert load_operator_token_hash(path) == hashlib.sha256(second.encode()).digest()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["", "zz", "00" * 31])
def test_damaged_operator_token(tmp_path, content):
    """A damaged or missing token file is one line that says how to make a new one, or what is wrong with it."""
    path = tmp_path / "token"
    with pytest.raises(ConfigurationError, match="make one: echo2-coordinator token operator"):
        load_operator_token_hash(path)
    path.write_text(content)
    with pytest.raises(ConfigurationError):
        load_operator_token_hash(path)


def test_a_tasks_options_are_a_table_and_a_path_in_it_starts_at_the_file():
    """They become the run's task spec; what JSON cannot hold in a few KiB is refused."""
    spec = make(task="file", task_options={"path": "own.py", "share": 0.5}).run.spec
    assert (spec.name, dict(spec.options)) == ("file", {"path": "/srv/pool/own.py", "share": 0.5})
    assert make(task_options={"path": "/x/own.py"}).run.spec.options["path"] == "/x/own.py"
    assert "bytes of JSON" in wrong(task_options={"long": "x" * 5000})


@pytest.mark.parametrize("url", ["postgresql://echo2@db/echo2", "postgresql+psycopg://echo2@db/echo2"])
def test_a_postgresql_database_is_named_by_its_address(tmp_path, url):
    """Its password is in a file beside the settings, never in them."""
    text = f'database = "{url}"\ndatabase_password_file = "secret"\n' + TEMPLATE.replace("PEER_ID", LEARNER)
    (tmp_path / "c.toml").write_text(text)
    config = load_config(tmp_path / "c.toml")
    assert config.ledger_url == url
    assert config.database_password_file == tmp_path / "secret"
    with pytest.raises(ConfigurationError, match="secret"):
        read_password(config.database_password_file)
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        read_password(config.database_password_file)
    (tmp_path / "secret").write_text("pass word\nno more\n")
    assert read_password(config.database_password_file) == "pass word"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://echo2:hush@db/echo2", "take the password out of database"),
        ("postgresql://echo2@db/echo2?password=hush", "take the password out of database"),
        ("mysql://echo2:hush@db/echo2", r"database must be postgresql\+psycopg://"),
        ("sqlite:///x", r"database must be postgresql\+psycopg://"),
        ("hush", r"database must be postgresql\+psycopg://"),
        ("postgresql://echo2:hush@db:port/echo2", r"database must be postgresql\+psycopg://"),
    ],
)
def test_other_databases_are_refused(tmp_path, url, told):
    """In words, and without the password."""
    (tmp_path / "c.toml").write_text(f'database = "{url}"\n' + TEMPLATE.replace("PEER_ID", LEARNER))
    with pytest.raises(ConfigurationError, match=told) as refused:
        load_config(tmp_path / "c.toml")
    assert "hush" not in str(refused.value)
