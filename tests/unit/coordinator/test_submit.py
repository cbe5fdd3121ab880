"""A run file: what is refused, what is resolved, what is forecast, what nodes see, what is written."""

import json
import tomllib

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from echo2.coordinator import cli, research, submit_text
from echo2.coordinator.config import load_config as load_coordinator
from echo2.coordinator.preview import Seen, SeenPrompt, look, seen_of
from echo2.coordinator.run_file import load_run_file, toml_text
from echo2.coordinator.submit import ask_learner, read_submission, report, write_folder
from echo2.coordinator.submit_text import duration, text_of
from echo2.coordinator.views import PoolView
from echo2.learner.config import load_config as load_learner
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity, load_or_create_identity
from echo2.tasks.model_card import TOKENIZER_FILE, ModelCard, tokenizer_sha256, write_model_card
from echo2.tasks.race import Race
from echo2.tasks.scorer import InlineScorer

RUN = """
[run]
name = "sums"
task = "arithmetic"
model_dir = "model"
steps = 60
S = 4
R = 256
tokens_max = 8

[objective]
clip_high = 0.28

[learner]
domain = "f32"
"""
FORECAST = """
[forecast]
nodes = 5
node_tokens_per_second = 90.0
response_tokens = 3
train_seconds = 3.0
broadcast_seconds = 0.5
price_node_hour = 0.2
price_learner_hour = 0.8
"""
SYMBOLS = [*"0123456789+=", "<bos>", "<eos>"]
LEARNER = {
    "objective": {"updates_per_step": 2, "clip_high": 0.28},
    "train": {"learning_rate": 1e-3},
    "adapter": None,
    "metrics": {"tensorboard": False},
    "domain": "f32",
    "seed": 0,
    "threads": 1,
    "checkpoints_kept": 3,
    "partial_seconds": 120.0,
}
SEEN = Seen("digits", 16, 50, 20, (), 5, {"temperature": 1.0})


@pytest.fixture
def folder(tmp_path):
    """A run file beside a model folder that can read sums."""
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({symbol: number for number, symbol in enumerate(SYMBOLS)}, unk_token="<eos>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(model / TOKENIZER_FILE))
    card = ModelCard(
        name="digits", architecture="llama", tokenizer_sha256=tokenizer_sha256(model), vocabulary_size=len(SYMBOLS),
        context_tokens=16, stop_ids=(13,), prompt_prefix="<bos>", special_ids=(12, 13),
    )  # fmt: skip
    write_model_card(model, card)
    (tmp_path / "run.toml").write_text(RUN + FORECAST)
    return tmp_path


def no_check(settings, source):
    return LEARNER


def shown(folder, *flags, pool=None, seen=SEEN):
    submission, learner = read_submission(folder / "run.toml", flags, check=no_check)
    return report(submission, learner, seen, pool)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("run.kapa=2", "unknown key 'run.kapa'; did you mean 'kappa'?"),
        ("S=2", "--set S=2: write run.S=2"),
        ("objektive.clip_low=0.1", "unknown key 'objektive'; did you mean 'objective'?"),
        ("forecast.node=3", "unknown key 'forecast.node'; did you mean 'nodes'?"),
        ("run.R=257", "run.R = 257 must be a multiple of run.n = 8"),
        ("run.S=high", '--set run.S=high: run.S = "high"'),
        ("run.task_options=3", "--set run.task_options=3: run.task_options = 3"),
        ("coordinator.listn=[]", "--set coordinator.listn=[]: unknown key 'listn'; did you mean 'listen'?"),
        (
            "coordinator.state_dir=x",
            "--set coordinator.state_dir=x: coordinator.state_dir cannot be set here: submit makes it",
        ),
        ("learner.home=x", "learner.home cannot be set here: submit makes it"),
        ("learner.train={}", "learner.train cannot be set here: it is a table of its own"),
        ("run.name.x=1", "'name' is a value in the file, not a table"),
        ("nonsense", "'nonsense' is not KEY=VALUE"),
        (".=1", "'.=1' is not KEY=VALUE"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, flag, words):
    """With the key, and a suggestion where one is near."""
    with pytest.raises(ConfigurationError) as error:
        read_submission(folder / "run.toml", [flag], check=no_check)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_is_laid_at_the_door_of_who_made_it(folder):
    """A flag's at the flag, the file's at the file, and one of the two together at both."""
    path = folder / "run.toml"

    def said(*flags):
        with pytest.raises(ConfigurationError) as error:
            read_submission(path, flags, check=no_check)
        return str(error.value)

    assert said("run.n=8", "run.S=-1").startswith("--set run.S=-1: run.S = -1: ")
    assert said("run.kappa=5", "run.S=3").startswith("--set run.kappa=5: run.kappa = 5 ")
    path.write_text(path.read_text().replace("nodes = 5", "nodes = 0"))
    assert said().startswith(f"{path}: ")
    assert said("run.S=3").startswith(f"{path} with --set run.S=3: ")


def test_the_learners_tables_are_judged_by_its_own_program(folder):
    """For real: a mistake names the run file, and every setting comes back with its value."""
    with pytest.raises(ConfigurationError) as error:
        read_submission(folder / "run.toml", ["train.learning_rat=1e-5"], check=ask_learner)
    assert str(error.value).startswith(
        "--set train.learning_rat=1e-5: unknown key 'train.learning_rat'; did you mean 'learning_rate'?"
    )
    _, learner = read_submission(folder / "run.toml", [], check=ask_learner)
    assert learner["objective"]["clip_high"] == 0.28
    assert learner["train"]["betas"] == [0.9, 0.999]


def test_every_value_says_where_it_comes_from(folder):
    """Default, file or flag; a key that submit makes is none of these."""
    origins = {key: (value, origin) for key, value, origin in shown(folder, "run.n=16", "run.task_options={}").resolved}
    assert origins["run.S"] == (4, "file")
    assert origins["run.kappa"] == (3, "default")
    assert origins["run.n"] == (16, "flag")
    assert origins["run.learner"] == (None, "made by submit")
    assert origins["objective.clip_high"] == (0.28, "file")
    assert origins["train.learning_rate"] == (1e-3, "default")
    assert origins["learner.domain"] == ("f32", "file")
    assert origins["forecast.nodes"] == (5, "file")


def test_the_forecast_is_of_the_runs_own_numbers(folder):
    """mu_i = 90 / 3 = 30: r = 256 / 150 s; T_train = 3 s decides, 60 steps; 0.2 x 5 + 0.8 dollars an hour."""
    found = shown(folder).forecast
    assert (found.step_seconds, found.bound_by, found.feasible) == (3.0, "the learner", True)
    seconds = 2 * (0.5 + 20 / 150) + 256 / 150 + 180
    assert found.seconds == pytest.approx(seconds)
    assert found.dollars == pytest.approx(seconds / 3600 * 1.8)
    assert shown(folder).warnings == ()


def test_a_pools_own_measures_fill_what_is_not_stated(folder):
    """Nodes, rate, T_train and T_bcast of `/v1/pool`; what the file states goes before."""
    pool = PoolView(
        coordinator="c", addresses=(), nodes_healthy=4, nodes_late=0, nodes_dead=0, nodes_suspended=0, mu_pool=80.0,
        mu_min=None, t_bcast_seconds=2.0, t_train_seconds=5.0, refused={}, protocol_errors=0, trouble="",
    )  # fmt: skip
    stated = shown(folder, pool=pool).supply
    assert (stated.nodes, stated.node_rate, stated.train_seconds, stated.broadcast_seconds) == (5, 30.0, 3.0, 0.5)
    (folder / "run.toml").write_text(RUN)
    known = shown(folder, pool=pool).supply
    assert (known.nodes, known.node_rate, known.train_seconds, known.broadcast_seconds) == (4, 20.0, 5.0, 2.0)
    fresh = shown(folder, pool=pool.model_copy(update={"t_train_seconds": None, "mu_pool": 0.0}))
    assert fresh.forecast is None
    assert [name.split()[0] for name in fresh.missing] == [
        "forecast.node_rollouts_per_second", "forecast.train_seconds",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["forecast.nodes=1"], "the pool does not keep the learner busy (equation 1): 4 nodes like these would"),
        (["forecast.broadcast_seconds=9.0"], "no pool would, with this T_bcast"),
        (["forecast.broadcast_seconds=6.0"], "Any one of these mends it: S = 6, with kappa = 3"),
        (["forecast.nodes=200"], "200 nodes with 2 samples at a time are more than R = 256"),
        (["run.lease_seconds=2.0"], "a lease takes a node about 2 s of run.lease_seconds = 2"),
        (["run.n=1"], "run.n = 1: a group of one has no advantage"),
        (["run.top_k=5"], "filters change what is sampled"),
        (["run.temperature=0.8"], "evaluations are drawn at temperature 1"),
        (["run.R=8"], "R / n = 1 groups for 2 updates"),
        (["run.tokens_max=12"], "prompts of up to 5 tokens leave 11 of the model's 16"),
        (["run.eval_every=3", "run.eval_samples=64", "forecast.nodes=3"], "an evaluation under way wants 1280 answers"),
        (["run.n=2"], "the task has 50 training prompts, a step takes 128"),
    ],
)
def test_what_would_show_too_late_is_a_warning(folder, flags, words):
    """Each with what to change."""
    assert any(words in warning for warning in shown(folder, *flags).warnings), shown(folder, *flags).warnings


async def test_nodes_see_prompts_in_their_template_and_no_answers(folder):
    """The first prompts in the run's order, as the scorer's process has them."""
    run = load_run_file(folder / "run.toml", [], learner=Identity(b"l" * 32).peer_id).file.run
    seen = await look(run)
    assert (seen.train, seen.heldout, seen.model) == (600, 300, "digits")
    assert len(seen.prompts) == 3
    for prompt in seen.prompts:
        assert prompt.text.startswith("<bos>")
        assert prompt.text.endswith("=")
        assert prompt.tokens_max == min(8, 16 - prompt.tokens)
    assert seen.sampling["stop_ids"] == [13]


async def test_of_several_turns_nodes_see_the_opening(folder):
    """And how long a turn may be, and what they play."""
    run = load_run_file(
        folder / "run.toml", ["run.task=race", "run.tokens_max=12"], learner=Identity(b"l" * 32).peer_id
    ).file.run
    from echo2.coordinator.prompts import FolderText

    seen = await seen_of(run, Race(), FolderText(run.model_dir), InlineScorer())
    assert seen.turns.endswith("turns of 64 tokens, played on the node as race")
    assert all(prompt.text.startswith("<bos>") for prompt in seen.prompts)


def test_the_report_is_words_and_json(folder):
    """Everything is in both."""
    made = shown(folder, "run.eval_every=6")
    words = text_of(made)
    for part in ("What nodes see", "Forecast", "dollars", "answers never leave the coordinator", "No warnings."):
        assert part in words
    assert json.loads(json.dumps(made.as_json()))["forecast"]["bound_by"] == "the learner"
    (folder / "run.toml").write_text(RUN)
    assert "No forecast: not known are forecast.nodes" in text_of(shown(folder))


def test_a_prompt_cannot_move_the_terminals_cursor():
    """A data set's control characters are written as escapes."""
    prompt = SeenPrompt("\x1b[31mred\u202e\nplain", tokens=3, tokens_max=4)
    seen = Seen("m", 8, 1, 1, (prompt,), 3, {})
    assert submit_text._seen_lines(seen, 1)[-2:] == ["    | \\x1b[31mred\\u202e", "    | plain"]


def test_the_folder_has_what_both_daemons_start_with(folder):
    """Settings that load, keys that agree, private folders, and the commands that come next."""
    out = folder / "out"
    flags = [
        "coordinator.rest={port=8099}",
        "metrics.wandb={project='p q'}",
        'coordinator.announce=["/dns/h.org/tcp/1"]',
    ]
    written = write_folder(out, folder / "run.toml", flags, shown(folder))
    coordinator = load_coordinator(out / "coordinator" / "coordinator.toml")
    learner = load_learner(out / "learner" / "learner.toml")
    assert coordinator.run.learner == load_or_create_identity(learner.identity_path).peer_id
    assert learner.coordinator_address.peer == load_or_create_identity(coordinator.identity_path).peer_id
    assert learner.coordinator_address.addresses == ("/dns/h.org/tcp/1",)
    assert coordinator.run.model_dir == learner.model_dir == folder / "model"
    assert (coordinator.run.S, coordinator.run.kappa, learner.objective.clip_high) == (4, 3, 0.28)
    assert (learner.domain, learner.metrics.wandb.project, coordinator.rest.port) == ("f32", "p q", 8099)
    assert coordinator.operator_token_path.stat().st_mode & 0o077 == 0
    assert written.commands[0] == f"echo2-coordinator serve --config {out}/coordinator/coordinator.toml"
    assert written.commands[-1] == "echo2 watch sums --coordinator http://127.0.0.1:8099"
    assert json.loads((out / "report.json").read_text())["resolved"]["run.S"] == {"value": 4, "from": "file"}
    assert written.token not in "".join(path.read_text(errors="replace") for path in out.rglob("*") if path.is_file())
    assert written.notes[-1].startswith(f"learner.toml names the model {folder / 'model'}; ")
    assert "'model_dir'" in written.notes[-1]
    with pytest.raises(ConfigurationError, match="not an empty folder; nothing was changed"):
        write_folder(out, folder / "run.toml", flags, shown(folder))


def test_a_learner_that_has_its_key_keeps_it(folder):
    """`run.learner` names it: no key is made, and where it belongs is said."""
    peer = Identity(b"k" * 32).peer_id
    out = folder / "out"
    written = write_folder(out, folder / "run.toml", [f"run.learner={peer}"], shown(folder))
    assert load_coordinator(out / "coordinator" / "coordinator.toml").run.learner == peer
    assert list((out / "learner" / "home").iterdir()) == []
    assert written.notes[0].startswith(f"the key of {peer} belongs into {out}/learner/home")


def test_a_coordinator_without_a_fixed_port_is_refused(folder):
    """The learner could not find it again after a restart."""
    with pytest.raises(ConfigurationError, match="no fixed port"):
        write_folder(folder / "o", folder / "run.toml", ['coordinator.listen=["/ip4/127.0.0.1/tcp/0"]'], shown(folder))


scalars = st.one_of(st.integers(-(2**53), 2**53), st.booleans(), st.floats(allow_nan=False), st.text(max_size=20))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@given(st.dictionaries(st.text(max_size=8), values, max_size=4))
def test_toml_is_read_back_as_it_was(value):
    """Any nesting of tables and lists, any text."""
    assert tomllib.loads(toml_text(value)) == value


@pytest.mark.parametrize(("seconds", "words"), [(90, "90 s"), (600, "10 min"), (3601, "1 h 1 min")])
def test_a_time_is_told_as_people_do(seconds, words):
    """Seconds, minutes, hours."""
    assert duration(seconds) == words


def command(*words):
    return CliRunner().invoke(cli.app, [*map(str, words)], catch_exceptions=True)


def test_the_command_wants_to_know_what_to_do(folder):
    """A dry run or a folder, one of the two."""
    for words in ((), ("--dry-run", "--out", folder / "o")):
        result = command("submit", folder / "run.toml", *words)
        assert isinstance(result.exception, ConfigurationError)
        assert "--dry-run" in str(result.exception)


def test_a_dry_run_writes_nothing(folder):
    """From the command line, with the learner's program and the scorer's process; as words and as JSON."""
    before = sorted(folder.rglob("*"))
    result = command("submit", folder / "run.toml", "--dry-run", "--set", "run.n=16")
    assert result.exit_code == 0, result.exception
    assert "run.n" in result.stdout
    assert "<bos>" in result.stdout
    assert sorted(folder.rglob("*")) == before
    found = json.loads(command("submit", folder / "run.toml", "--dry-run", "--json").stdout)
    assert found["resolved"]["objective.clip_high"] == {"value": 0.28, "from": "file"}
    assert len(found["nodes_see"]["prompts"]) == 3
    assert "answer" not in json.dumps(found["nodes_see"])


def test_a_folder_in_use_is_refused_before_anything_is_judged(folder):
    """No report is printed for a folder that will not be made."""
    result = command("submit", folder / "run.toml", "--out", folder, "--set", "nonsense")
    assert "is not an empty folder; name another; nothing was changed" in str(result.exception)
    assert result.stdout == ""


def test_the_long_wait_is_told_to_a_terminal_alone(folder, monkeypatch, capsys):
    """In a pipe stderr stays for what is wrong."""
    for terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        with pytest.raises(ConfigurationError, match="not KEY=VALUE"):
            research.submit(folder / "run.toml", dry_run=True, setting=["nonsense"])
        assert ("loading" in capsys.readouterr().err) == terminal


def test_an_export_wants_settings_and_an_empty_folder(folder, monkeypatch):
    """Without `--config` it says what is missing; a folder in use is left as it is unless that is asked for."""
    monkeypatch.chdir(folder)
    result = command("export", "sums", "--out", folder / "results")
    assert "there is no settings file coordinator.toml here; name it with --config" in str(result.exception)
    result = command("export", "sums", "--config", "none.toml", "--out", folder)
    assert "is not an empty folder; name another, or take --overwrite" in str(result.exception)
    result = command("export", "sums", "--config", "none.toml", "--out", folder, "--overwrite")
    assert "there is no settings file none.toml" in str(result.exception)
