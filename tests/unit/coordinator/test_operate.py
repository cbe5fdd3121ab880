"""`echo2-coordinator pool | nodes | runs | events | decisions | access`, against REST on a real socket."""

from __future__ import annotations

import io
import json
import re

import pytest
from rest_stage import PEER, STRANGER, TOKEN, Stage
from rest_thread import make_certificate, served
from rich.console import Console
from typer.testing import CliRunner

from echo2.coordinator import operate_text as text
from echo2.coordinator.main import app
from echo2.coordinator.node_changes import CHANGES
from echo2.coordinator.rest_client import Declined, NoAnswer
from echo2.coordinator.rest_gate import Door
from echo2.coordinator.rest_tls import server_context
from echo2.p2p.errors import ConfigurationError

RUN = '[run]\nname = "sums"\ntask = "arithmetic"\nsteps = 20\nR = 64\n'


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path, stream_seconds=60.0)
    made.desk.nodes = 3
    yield made
    made.close()


@pytest.fixture
def here(tmp_path, stage):
    """The settings of a coordinator that runs on this machine, on a port it found free."""
    folder = tmp_path / "pool"
    (folder / "state").mkdir(parents=True)
    with served(stage) as url:
        (folder / "coordinator.toml").write_text("[rest]\nport = 0\n")
        (folder / "state" / "status.json").write_text(json.dumps({"rest": url}))
        token = folder / "state" / "local-token"
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        yield folder


def run(folder, *arguments, code=0):
    result = CliRunner().invoke(app, [*arguments, "--config", str(folder / "coordinator.toml")], env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_on_its_own_machine_no_url_and_no_token_need_be_named(here, stage):
    """The settings file says where it is, the state folder who asks."""
    assert "1 healthy" in run(here, "pool")
    assert PEER[-8:] in run(here, "nodes")
    assert "sums" in run(here, "runs")
    assert run(here, "runs", "pause", "--reason", "lunch").startswith("sums is running")
    assert run(here, "nodes", "suspend", "n0", "--reason", "forged") == f"n0 {PEER} is suspended\n"
    assert stage.desk.changes == [
        ("pause_run", "sums", "operator", "lunch"),
        ("suspend_node", PEER, "operator", "forged"),
    ]


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["pool"], "/v1/pool"),
        (["nodes"], "/v1/nodes"),
        (["nodes", "list", "--state", "active"], "/v1/nodes?state=active"),
        (["nodes", "show", PEER[-6:]], f"/v1/nodes/{PEER}"),
        (["runs", "list"], "/v1/runs"),
        (["runs", "show"], "/v1/runs/sums"),
        (["decisions"], "/v1/decisions"),
    ],
)
async def test_with_json_they_say_what_rest_says(here, stage, arguments, path):
    """Word for word: a program needs to know one form."""
    said = json.loads(run(here, *arguments, "--json"))
    async with stage.client() as client:
        assert said == (await client.get(path)).json()


def test_every_change_of_a_node_is_a_command_that_must_say_why(here, stage):
    """And a node is named by its name, its peer id, or the end of it, if that is one node's alone."""
    for verb in CHANGES:
        assert run(here, "nodes", verb, PEER[-6:], "--reason", "x", "--json").startswith("{")
        assert "reason" in run(here, "nodes", verb, PEER, code=2)
    assert [change[0] for change in stage.desk.changes] == [change.method for change in CHANGES.values()]
    with pytest.raises(ConfigurationError, match="no node 'n9' was ever admitted"):
        run(here, "nodes", "suspend", "n9", "--reason", "x")


def test_a_change_that_is_not_possible_is_said_in_words(here):
    """A state that forbids it, a run there is none of, a stop without a reason."""
    with pytest.raises(Declined, match="the run is running, not paused"):
        run(here, "runs", "resume")
    with pytest.raises(ConfigurationError, match="no run 'other'; it serves sums"):
        run(here, "runs", "pause", "other")
    with pytest.raises(ConfigurationError, match="say why with --reason"):
        run(here, "runs", "stop")


def test_events_are_shown_oldest_first_and_followed(here, stage, monkeypatch):
    """As a table, or a line each as they come, until the person has enough."""
    for number in range(3):
        stage.desk.add_event(f"reason {number}")
    table = run(here, "events", "--limit", "2")
    assert table.index("reason 1") < table.index("reason 2")
    assert "reason 0" not in table
    seen = []

    def tell(event, as_json):
        seen.append(event["reason"])
        if len(seen) == 3:
            stage.desk.add_event("came later")
        if event["reason"] == "came later":
            raise KeyboardInterrupt

    monkeypatch.setattr("echo2.coordinator.operate._tell", tell)
    run(here, "events", "--follow", "--limit", "3", code=130)
    assert seen == ["reason 0", "reason 1", "reason 2", "came later"]


def test_a_run_file_is_judged_by_the_coordinator(here, tmp_path):
    """In words or as REST says it; exit code 1 for one that is wrong. A file for `echo2 submit` will do as it is."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    assert re.search(r"run\.steps +20 +file", run(here, "runs", "validate", str(path)))
    assert "No forecast: not known are forecast.train_seconds" in run(here, "runs", "estimate", str(path))
    assert json.loads(run(here, "runs", "estimate", str(path), "--json"))["nodes_see"]["model"] == "small"
    path.write_text(RUN + 'model_dir = "elsewhere"\n')
    said = run(here, "runs", "validate", str(path))
    assert f"note: run.model_dir of {path} is not used: the model is the coordinator's own" in said
    assert re.search(r"run\.steps +20 +file", said)
    path.write_text(RUN.replace("steps", "step"))
    assert "did you mean 'steps'?" in " ".join(run(here, "runs", "validate", str(path), code=1).split())


def test_a_coordinator_that_does_not_run_is_said_to(tmp_path):
    """With the command that starts it; and where there are no settings, what to name."""
    (tmp_path / "coordinator.toml").write_text("[rest]\nport = 9\n")
    with pytest.raises(NoAnswer, match="is it running"):
        run(tmp_path, "pool")
    with pytest.raises(ConfigurationError, match="there is no settings file"):
        run(tmp_path / "elsewhere", "pool")


def test_from_elsewhere_url_and_token_are_named(here, stage, tmp_path):
    """A viewer's token reads and changes nothing."""
    url = json.loads((here / "state" / "status.json").read_text())["rest"]
    file = tmp_path / "token"
    file.write_text(stage.token("viewer")["Authorization"].partition(" ")[2])
    file.chmod(0o600)
    where = ["--coordinator", url, "--token-file", str(file)]
    assert "1 healthy" in CliRunner().invoke(app, ["pool", *where]).output
    result = CliRunner().invoke(app, ["runs", "pause", *where])
    assert isinstance(result.exception, ConfigurationError)
    assert "needs the role researcher; a-viewer is viewer" in str(result.exception)


def test_over_tls_its_own_machine_trusts_this_very_certificate(tmp_path):
    """Which names the machine for others, and not the loopback at which it is asked."""
    stage = Stage(tmp_path, door=Door(open_reads=False, tls=True))
    certificate, key = make_certificate(tmp_path)
    with served(stage, server_context(certificate, key)) as url:
        port = url.rpartition(":")[2]
        folder = tmp_path / "pool"
        (folder / "state").mkdir(parents=True)
        (folder / "state" / "local-token").write_text(TOKEN)
        (folder / "state" / "local-token").chmod(0o600)
        settings = f'[rest]\nhost = "0.0.0.0"\nport = {port}\ncertificate = "{certificate}"\nkey = "{key}"\n'
        (folder / "coordinator.toml").write_text(settings)
        assert "1 healthy" in run(folder, "pool")
    stage.close()


def test_access_tokens_are_made_listed_and_revoked_without_a_coordinator(tmp_path):
    """In the ledger beside it: so the first can be made before it starts."""
    settings = f'[run]\nname = "r"\ntask = "arithmetic"\nmodel_dir = "m"\nlearner = "{STRANGER}"\nsteps = 1\n'
    (tmp_path / "coordinator.toml").write_text(settings)
    token = run(tmp_path, "access", "create", "--role", "viewer", "--name", "ann", "--expires-hours", "2").strip()
    assert len(token) == 43
    assert token.encode() not in (tmp_path / "state" / "ledger.sqlite3").read_bytes()
    with pytest.raises(ConfigurationError, match="'ann' has a token that counts"):
        run(tmp_path, "access", "create", "--role", "viewer", "--name", "ann")
    for name in ("a b", "operator", ""):
        with pytest.raises(ConfigurationError):
            run(tmp_path, "access", "create", "--role", "viewer", "--name", name)
    assert re.search(r"ann +viewer +counts", run(tmp_path, "access", "list"))
    assert "counts for nothing" in run(tmp_path, "access", "revoke", "ann")
    (row,) = json.loads(run(tmp_path, "access", "list", "--json"))
    assert (row["name"], row["role"], row["revoked_seconds"] is None) == ("ann", "viewer", False)
    for name in ("ann", "operator"):
        with pytest.raises(ConfigurationError):
            run(tmp_path, "access", "revoke", name)


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_say_what_strangers_wrote_without_its_effects(stage, width):
    """Nothing of the columns is cut at 80, and an escape in a reason is shown as one."""
    nodes = [node.model_dump(mode="json") for node in stage.desk.nodes_view()]
    nodes[1] |= {
        "name": "basement-rig-4090-number-two", "state": "suspended", "rejected": 123_456, "mu": 0.00123,
        "reason": "forged \x1b[31m rewards", "version_lag": 12,
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    console.print(text.nodes_table(nodes, width=width))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for part in ("suspended", "123456", "0.00123", "forged \\x1b[31m rewards", PEER[-8:], "rejected"):
        assert part in shown
    assert "…" not in shown


def test_a_node_is_shown_in_units_and_times_for_people(stage):
    """Its peer id in one piece at 80 columns, times as UTC, no number with more digits than mean something."""
    node = stage.desk.nodes_view()[0].model_dump(mode="json") | {
        "state": "suspended", "state_since": 1_796_145_410.468615, "state_by": "operator", "price_hour": 0.35,
        "state_expires": 1_796_149_010.5, "last_seen_seconds": 0.02717861499695573, "rho_dollars": 1.27e-6,
        "benchmark_tokens_per_second": 173.7068609841321, "warmup_leases": 10, "warmup_returned": 7,
        "balance_credits": 12171.0, "balance_dollars": -12.5,
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    console.print(text.node_table(node))
    shown = console.file.getvalue()
    for part in (
        node["peer"], "suspended since 2026-12-01 17:16:50 UTC, by operator", "2026-12-01 18:16:50 UTC",
        "heard of 0 s ago",
        "174 tokens/s", "7 of its first 10 leases are back", "$0.35 an hour; rho $0.00127 for 1000 rollouts",
        "12,171.00 credits, -$12.50",
    ):  # fmt: skip
        assert part in shown
    assert not re.search(r"\d\.\d{6}", shown)
    node |= {"price_hour": 0.0, "last_seen_seconds": None, "version": None, "warmup_leases": 0, "state_since": None}
    console.print(text.node_table(node))
    assert "none: a volunteer" in console.file.getvalue()
    assert "heard of never" in console.file.getvalue()


def test_a_state_that_there_is_not_is_said_with_those_that_there_are(here):
    """Before anything is asked, and by the name that was typed."""
    said = run(here, "nodes", "list", "--state", "suspende", code=2)
    assert "--state" in said
    assert "suspended" in said
