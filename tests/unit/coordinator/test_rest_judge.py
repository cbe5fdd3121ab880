"""Run files judged over REST."""

from __future__ import annotations

import json
import tomllib

import pytest
from rest_stage import CONFIG, PEER, STRANGER, Stage, Text, checked, is_problem

from echo2.coordinator.run_judge import WAITING_MAX, Judge
from echo2.p2p.errors import ConfigurationError

RUN = """
[run]
name = "sums"
task = "arithmetic"
steps = 20
R = 64
n = 8
"""

FORECAST = """
[forecast]
nodes = 4
node_rollouts_per_second = 5.0
train_seconds = 4.0
broadcast_seconds = 1.0
price_node_hour = 0.1
price_learner_hour = 1.0
"""

TOML = {"Content-Type": "application/toml"}


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.close()


@pytest.fixture
def asked(stage):
    """Posts as a researcher."""
    headers = stage.token("researcher")

    async def ask(path, content, kind="application/toml"):
        async with stage.client(**headers) as client:
            return await client.post(path, content=content, headers={"Content-Type": kind})

    return ask


async def test_a_run_file_in_order_is_said_to_be(asked):
    """As TOML, as plain text and as JSON tables; every key has its value and origin."""
    tables = {"run": {"name": "sums", "task": "arithmetic", "steps": 20, "R": 64, "n": 8}}
    for content, kind in ((RUN, "application/toml"), (RUN, "text/plain"), (json.dumps(tables), "application/json")):
        answer = await asked("/v1/runs/validate", content, kind)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        assert (said["valid"], said["problem"]) == (True, "")
        found = {row["key"]: row for row in said["settings"]}
        assert found["run.steps"] == {"key": "run.steps", "value": 20, "origin": "file"}
        assert found["run.S"]["origin"] == "default"
        assert found["run.learner"]["origin"] == "made by submit"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[run", "is not valid TOML"),
        (RUN + "seed = -1", "run.seed = -1: should be greater than or equal to 0"),
        (RUN.replace("steps", "step"), "unknown key 'run.step'; did you mean 'steps'?"),
        (RUN.replace('"arithmetic"', '"arithmetics"'), "did you mean 'arithmetic'?"),
        (RUN + "[coordinator]\nhost = 1", "unknown key 'host'; it belongs to [rest]"),
        (RUN + "[learner]\nhome = '/x'", "learner.home cannot be set here"),
        (RUN + "model_dir = '/etc'", "leave model_dir out"),
        ("run = 5", "run"),
        ("", "'run' is missing"),
        ("a" + ".a" * 30 + " = 1", "has a key of more than"),
    ],
)
async def test_a_run_file_that_is_wrong_says_why(asked, content, says):
    """To `validate` that is the answer; `estimate` has none to give."""
    said = (await asked("/v1/runs/validate", content)).json()
    assert not said["valid"]
    assert says in said["problem"]
    assert says in is_problem(await asked("/v1/runs/estimate", content), 422)


@pytest.mark.parametrize(
    "task",
    ['"file"\ntask_options = { path = "/tmp/own.py" }', '"math"\ntask_options = { path = "/etc/passwd" }', '"file"'],
)
async def test_no_file_of_this_machine_is_read_or_run(asked, monkeypatch, task):
    """A researcher's Python is not executed over REST, and no data set of theirs is opened."""
    monkeypatch.setattr("echo2.coordinator.run_judge.open_scorer", None)
    monkeypatch.setattr("echo2.coordinator.run_judge.make_task", None)
    content = RUN.replace('"arithmetic"', task)
    said = (await asked("/v1/runs/validate", content)).json()
    assert "over REST a task has no file of its own" in said["problem"]
    assert "over REST a task has no file of its own" in is_problem(await asked("/v1/runs/estimate", content), 422)


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"\xff", "application/toml", 422),
        (b"{", "application/json", 422),
        (b"[]", "application/json", 422),
        (b"[" * 60_000, "application/json", 422),
        (b"{}", "", 415),
        (b"{}", "application/x-www-form-urlencoded", 415),
    ],
)
async def test_what_is_no_text_at_all_is_refused(asked, content, kind, status):
    """By its bytes or by its type."""
    is_problem(await asked("/v1/runs/validate", content, kind), status)


async def test_an_estimate_has_forecast_warnings_and_what_nodes_see(asked):
    """Of the file's own numbers and the coordinator's model; a pool's measures fill what the file leaves out."""
    answer = await asked("/v1/runs/estimate", RUN + FORECAST)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["missing"] == []
    assert said["supply"]["nodes"] == 4
    assert said["forecast"]["seconds"] > 20 * 4.0
    assert said["forecast"]["dollars"] > 0
    assert said["nodes_see"]["model"] == "small"
    assert len(said["nodes_see"]["prompts"]) == 3
    short = (await asked("/v1/runs/estimate", RUN)).json()
    assert short["forecast"] is None
    assert short["missing"] == ["forecast.train_seconds"], "the pool knows the rest"


async def test_numbers_that_no_forecast_can_be_made_of_are_the_files_fault(asked):
    """Not a failure of the coordinator's."""
    tiny = FORECAST.replace("5.0", "5e-324")
    detail = is_problem(await asked("/v1/runs/estimate", RUN + tiny), 422)
    assert "too large or too small" in detail


async def test_judging_takes_its_turn(stage):
    """One at a time, a few waiting; the next is told to come again."""
    judge = stage.rooms.judge
    judge._turn.acquire_on_behalf_of_nowait("somebody")

    class Full:
        tasks_waiting = WAITING_MAX

    judge._turn.statistics = Full
    async with stage.client(**stage.token("researcher")) as client:
        answer = await client.post("/v1/runs/validate", content=RUN, headers=TOML)
    is_problem(answer, 503)
    assert answer.headers["retry-after"] == "5"


async def test_a_judgement_is_bounded_in_time(autojump_clock):
    """Whatever it waits for; the answer says where else to ask."""
    judge = Judge(CONFIG, Text(), lambda: None, check=checked)
    judge._turn.acquire_on_behalf_of_nowait("somebody, for ever")
    with pytest.raises(Exception, match="echo2 submit --dry-run"):
        await judge.validate({"run": {}})


async def test_the_judgement_is_that_of_the_learners_program(stage):
    """What it says of its own tables is what the researcher is told."""

    def refuses(settings, source):
        raise ConfigurationError(f"{source}: train.learning_rate = -1: should be positive")

    judge = Judge(CONFIG, Text(), stage.desk.pool_view, check=refuses)
    judged = await judge.validate(RUN + "[train]\nlearning_rate = -1")
    assert judged.problem == "the run file: train.learning_rate = -1: should be positive"
    assert PEER


MORE = RUN.replace('"sums"', '"more"') + f'weight = 2.0\nlearner = "{STRANGER}"\n'


async def post_run(stage, content, role="operator", query=""):
    async with stage.client(**stage.token(role)) as client:
        return await client.post(f"/v1/runs{query}", content=content, headers=TOML)


async def test_a_run_is_created_of_a_run_file(stage):
    """On the coordinator's own model; the answer has what its learner starts with, and says who is to start it."""
    answer = await post_run(stage, MORE + "[train]\nlearning_rate = 3e-5\n", query="?reason=more%20to%20learn")
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["run"]["run"], made["run"]["state"], made["run"]["weight"]) == ("more", "ready", 2.0)
    learner = tomllib.loads(made["learner_toml"])
    assert (learner["run"], learner["train"]) == ("more", {"learning_rate": 3e-5})
    assert learner["coordinator"] == f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}"
    assert "start it there" in made["next"]
    ((verb, run, actor, reason),) = stage.desk.changes
    assert (verb, run.name, run.weight, actor, reason) == ("create_run", "more", 2.0, "a-operator", "more to learn")
    assert run.model_dir == CONFIG.run.model_dir


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (RUN.replace('"sums"', '"more"'), 422, "learner is missing: the peer id that `echo2-learner identity` prints"),
        (MORE.replace("R = 64", "R = 63"), 422, "must be a multiple of run.n"),
        (MORE + "[coordinator]\nheartbeat_seconds = 5.0\n", 422, "leave it out: this coordinator has its settings"),
        (MORE + "model_dir = '/etc'", 422, "leave model_dir out"),
        (MORE.replace('"more"', '"sums"'), 409, "has a run 'sums' already; take another name"),
    ],
)
async def test_a_run_that_cannot_be_is_not_created(stage, content, status, says):
    """Each mistake is said, and nothing is made."""
    answer = await post_run(stage, content)
    assert says in is_problem(answer, status)
    assert stage.desk.changes == []


async def test_only_operators_create_runs(stage):
    """A researcher may judge a run file, and asks an operator for the run."""
    is_problem(await post_run(stage, MORE, role="researcher"), 403)
    assert stage.desk.changes == []
