"""The learner's settings and command line: mistakes are told in one line, before anything slow is begun."""

import subprocess
import sys

import pytest

from echo2.learner.config import load_config
from echo2.learner.loss import Objective, objective_of
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.join import JoinString

PEER = Identity(b"c" * 32).peer_id
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
JOIN = str(JoinString(peer=PEER, addresses=("/ip4/127.0.0.1/tcp/4001",), token="abcd" * 9, run="demo"))


def write(tmp_path, **changes):
    values = {"home": "home", "coordinator": ADDRESS, "run": "demo", "model_dir": "model"} | changes
    path = tmp_path / "learner.toml"
    text = "".join(f"{key} = {value if not isinstance(value, str) else repr(value)}\n" for key, value in values.items())
    path.write_text(text)
    return path


def test_defaults_and_paths_beside_the_file(tmp_path):
    """The shortest settings file is four lines; relative paths start at it."""
    config = load_config(write(tmp_path))
    assert config.home == tmp_path / "home"
    assert (config.run_name, config.coordinator_address.peer) == ("demo", PEER)
    assert config.coordinator_address.addresses == ("/ip4/127.0.0.1/tcp/4001",)
    objective = config.objective
    assert (objective.cap, objective.kl_weight, objective.reference, objective.updates_per_step) == (
        2.0,
        0.0,
        "none",
        2,
    )
    assert config.train.learning_rate == 2e-4
    assert config.adapter is None


def test_each_part_of_the_objective_is_set_in_its_table(tmp_path):
    """What `[objective]`, `[train]` and `[adapter]` say is what the trainer is given."""
    path = write(tmp_path)
    path.write_text(
        path.read_text()
        + """
[objective]
clip_low = 0.1
clip_high = 0.28
ratio_cap = "off"
kl_weight = 0.01
reference = "base"
grouping = "initial_state"
normalise_std = false
aggregation = "constant"
aggregation_tokens = 64
updates_per_step = 1
[train]
learning_rate = 0
[adapter]
"""
    )
    config = load_config(path)
    assert objective_of(config.objective) == Objective(0.1, 0.28, None, 0.01, "constant", 64)
    assert (config.objective.grouping, config.objective.normalise_std) == ("initial_state", False)
    assert config.train.learning_rate == 0.0
    assert config.adapter.rank == 16


def test_a_join_string_names_the_run(tmp_path):
    """With a join string nothing else is needed to find the run."""
    path = write(tmp_path, coordinator=JOIN)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("run")))
    assert load_config(path).run_name == "demo"
    assert load_config(path).coordinator_address.peer == PEER


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"coordinator": "127.0.0.1:4001"}, "neither a join string"),
        ({"coordinator": "/ip4/127.0.0.1/tcp/4001/p2p/nobody"}, "is not a"),
        ({"coordinator": JOIN[:-8]}, "join string"),
        ({"coordinator": JOIN, "run": "other"}, "for run 'demo'"),
        ({"learning_rate": 1e-4}, "unknown key 'learning_rate'; it belongs to [train]"),
        ({"clip_high": 0.3}, "unknown key 'clip_high'; it belongs to [objective]"),
        ({"checkpoints_kept": 1}, "at least 2"),
        ({"domain": "q4_1"}, "domain"),
        ({"listen": "[]"}, "listen"),
        ({"coordinator": f"/ip4/999.1.1.1/tcp/1/p2p/{PEER}"}, "999.1.1.1 is not an IPv4 address"),
        ({"coordinator": f"/dns/{'a' * 300}/tcp/1/p2p/{PEER}"}, "must be an address like"),
        ({"coordinator": "/ip4/1.1.1.1/tcp/1/p2p/" + "1" * 4000}, "is not an Ed25519 peer id"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, changes, words):
    """What is wrong is named, with what is allowed."""
    path = write(tmp_path, **changes)
    if changes.get("listen"):
        path.write_text(path.read_text().replace(repr(changes["listen"]), changes["listen"]))
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[train]\nlearning_rate = -1", "train.learning_rate = -1"),
        ("[train]\nlearning_rat = 1e-4", "unknown key 'train.learning_rat'; did you mean 'learning_rate'?"),
        ("[objective]\nlearning_rate = 1", "it belongs to [train]"),
        ("[objective]\nratio_cap = 0", 'objective.ratio_cap = 0: must be a number above 0 and at most 1000, or "off"'),
        ("[objective]\nratio_cap = true", "objective.ratio_cap = true: must be a number"),
        ("[objective]\nclip_low = 1.5", "objective.clip_low"),
        ("[objective]\ngrouping = 'seed'", "'prompt', 'initial_state' or 'batch'"),
        ("[objective]\naggregation = 'mean'", "'token', 'sequence' or 'constant'"),
        ("[objective]\nkl_weight = 0.1", 'objective.kl_weight = 0.1 needs objective.reference = "base"'),
        ("[objective]\naggregation = 'constant'", "needs objective.aggregation_tokens"),
        ("[objective]\naggregation_tokens = 8", 'only for objective.aggregation = "constant"'),
        ("[adapter]\ntargets = ['all']", "adapter.targets[0]"),
    ],
)
def test_mistakes_in_a_table_are_told_in_one_line(tmp_path, table, words):
    """The key is named with its table."""
    path = write(tmp_path)
    path.write_text(f"{path.read_text()}\n{table}\n")
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_without_a_run_is_not_enough(tmp_path):
    """An address says where, not what."""
    path = write(tmp_path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("run")))
    with pytest.raises(ConfigurationError, match="'run' is missing"):
        load_config(path)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "echo2.learner.main", *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_identity_is_made_once_and_printed(tmp_path):
    """Twice the same line: the key is made on first use and never again."""
    first, second = (command("identity", "--home", str(tmp_path / "home")) for _ in range(2))
    assert first.returncode == 0
    assert first.stdout == second.stdout
    assert first.stdout.startswith("12D3KooW")


def test_a_users_mistake_is_one_line_and_exit_2(tmp_path):
    """No traceback for a wrong model name, a missing file or a missing model."""
    for arguments in (
        ["prepare", "--model", "huge", "--out", str(tmp_path / "out")],
        ["run", "--config", str(tmp_path / "none.toml")],
        ["run", "--config", str(write(tmp_path))],
    ):
        result = command(*arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ")
        assert len(result.stderr.splitlines()) == 1
