"""The documents name commands, options, settings, requests, codes and files that exist."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer.main

from echo2.coordinator import cli, settings_doc
from echo2.coordinator import main as coordinator_main
from echo2.coordinator.config import AdmissionConfig, CoordinatorConfig, RestConfig, RunConfig
from echo2.coordinator.ledger import LedgerUnavailable
from echo2.coordinator.rest_roles import NEEDS
from echo2.coordinator.run_file import load_run_file
from echo2.coordinator.views import StepView
from echo2.learner import main as learner_main
from echo2.learner.config import AdapterSettings, LearnerConfig, MetricsSettings, ObjectiveSettings, TrainSettings
from echo2.node import main as node_main
from echo2.p2p import swarm
from echo2.p2p.identity import Identity
from echo2.p2p.messages import StepMetrics
from echo2.tasks.catalog import TASKS, make_task

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "packaging" / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
COMMANDS = {
    "echo2": typer.main.get_command(cli.app),
    "echo2-coordinator": typer.main.get_command(coordinator_main.app),
    "echo2-learner": typer.main.get_command(learner_main.app),
    "echo2-node": typer.main.get_command(node_main.app),
}
REST_ONLY = {
    *("node_states.py", "run_life.py", "access.py", "tokens.py", "books.py", "event_feed.py", "run_judge.py"),
}
"""Their refusals answer REST requests, not peers."""


def text(name: str) -> str:
    return next(page for page in PAGES if page.name == name).read_text(encoding="utf-8")


def command_lines() -> list[str]:
    """Every command of ours in a code block or between backticks."""
    found = []
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```\w*\n(.*?)```", content, re.DOTALL)
        inline = re.findall(r"`([^`\n]+)`", content)
        for line in [line for block in blocks for line in block.splitlines()] + inline:
            line = re.sub(r"^\S*\.venv/bin/", "", line.strip())
            if re.match(r"echo2(-coordinator|-learner|-node)? [a-z]", line):
                found.append(line)
    return found


def options(command) -> dict[str, object]:
    """Names and defaults; of one that is worked out later, what `--help` says of it."""
    found = {}
    for parameter in command.params:
        shown = getattr(parameter, "show_default", None)
        found |= dict.fromkeys(parameter.opts, shown if isinstance(shown, str) else parameter.default)
    return found


@pytest.mark.parametrize("line", sorted(set(command_lines())))
def test_every_command_shown_exists_with_its_options(line):
    """A reader can type what is printed."""
    words = shlex.split(line, comments=True)
    command = COMMANDS[words.pop(0)]
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    assert {word for word in words if word.startswith("--")} <= {*options(command), "--help"}


def test_some_commands_are_shown():
    """The search above finds what it should."""
    assert len(command_lines()) > 20


def test_the_volunteers_options_have_the_defaults_they_have():
    """Documented from the code, not from memory."""
    real = options(COMMANDS["echo2-node"].commands["run"])
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+) \|", text("volunteers.md"), re.MULTILINE)
    assert len(rows) >= 8
    for option, default in rows:
        assert str(real[option] or "none") == default.strip()


def test_the_settings_shown_exist():
    """Keys of both settings files, in the examples and in the tables."""
    found = re.findall(r"```toml\n(.*?)```", text("operators.md"), re.DOTALL)
    coordinator, learner, database = (block for block in found if not block.startswith(("[rest]", "[[runs]]")))
    for runs in (block for block in found if block.startswith("[[runs]]")):
        assert {key for run in tomllib.loads(runs)["runs"] for key in run} <= set(RunConfig.model_fields)
    for rest in (block for block in found if block.startswith("[rest]")):
        assert RestConfig.model_validate(tomllib.loads(rest)["rest"] | {"port": 1}, strict=True)
    assert set(tomllib.loads(database)) <= set(CoordinatorConfig.model_fields)
    shown = tomllib.loads(coordinator)
    assert set(shown.pop("run")) <= set(RunConfig.model_fields)
    assert set(shown) <= set(CoordinatorConfig.model_fields)
    assert set(tomllib.loads(learner)) <= set(LearnerConfig.model_fields)


def test_the_tables_of_settings_are_as_the_code_has_them():
    """`python -m echo2.coordinator.settings_doc packaging/docs/*.md` mends them."""
    pages = {name: text(name) for name in ("researchers.md", "operators.md")}
    marked = [name for name in settings_doc.TABLES for page in pages.values() if f"<!-- settings {name} -->" in page]
    assert sorted(marked) == sorted(settings_doc.TABLES)
    for page in pages.values():
        assert settings_doc.rewritten(page) == page
    assert all(f"| `{key}` |" in pages["researchers.md"] for key in RunConfig.model_fields)
    assert all(f"| `{key}` |" in pages["operators.md"] for key in AdmissionConfig.model_fields)


def test_the_run_file_shown_is_one(tmp_path):
    """As it stands on the page, up to the learner's own tables, and those are the learner's."""
    blocks = re.findall(r"```toml\n(.*?)```", text("researchers.md"), re.DOTALL)
    shown = next(block for block in blocks if "[forecast]" in block)
    (tmp_path / "run.toml").write_text(shown)
    submission = load_run_file(tmp_path / "run.toml", [], learner=Identity(b"l" * 32).peer_id)
    assert submission.file.forecast.rate == 75.0
    values = submission.learner_values()
    assert set(values) <= set(LearnerConfig.model_fields)
    assert set(values["objective"]) <= set(ObjectiveSettings.model_fields)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("objective", ObjectiveSettings),
        ("train", TrainSettings),
        ("adapter", AdapterSettings),
        ("metrics", MetricsSettings),
    ],
)
def test_every_setting_of_training_is_shown_with_its_default(name, kind):
    """The researcher's tables and the settings agree, none missing on either side; a default is shown as TOML."""
    table = text("researchers.md").split(f"\n`[{name}]`")[1].split("\n\n")[1]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.+?)`)? *\|", table, re.MULTILINE)
    assert [key for key, _ in rows] == list(kind.model_fields)
    for key, shown in rows:
        real = kind.model_fields[key].default
        given = tomllib.loads(f"{key} = {shown}")[key] if shown else None
        assert real == (tuple(given) if isinstance(given, list) else given)


def test_every_number_of_a_step_shown_is_one():
    """What researchers are told to read is in a step's view, or in the learner's log."""
    section = text("researchers.md").split("## What to read while it runs")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    shown = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert len(shown) > 8
    assert shown <= set(StepView.model_fields)
    logged = re.findall(r"`(\w+)`", section.split("The learner's log has")[1].split("\n\n")[0])
    assert set(logged) <= set(StepMetrics.model_fields)


def test_the_tasks_shown_are_the_catalogues():
    """Names and sizes."""
    rows = re.findall(r"^\| `([\w-]+)` \| .*?(\d+) for training, (\d+) held out", text("researchers.md"), re.MULTILINE)
    assert {name for name, _, _ in rows} == {*TASKS, "math"}
    for name, train, heldout in rows:
        task = make_task(name)
        assert (task.train_size, task.heldout_size) == (int(train), int(heldout))


def test_every_request_shown_is_served_and_every_one_served_is_shown():
    """The operator's table of REST requests and the routes."""
    routes = {(method, re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), path)) for method, path in NEEDS}
    shown = set()
    for row in re.findall(r"^\| (`(?:GET|POST|DELETE) .*?) \|", text("operators.md"), re.MULTILINE):
        method, last = "", ""
        for part in re.findall(r"`([^`]+)`", row):
            if " " in part:
                method, last = part.split()
            else:
                last = last.rsplit("/", 1)[0] + part
            shown.add((method, last))
    assert shown == routes


def test_the_roles_shown_are_those_of_the_table():
    """What the operator's page says that each request needs."""
    rows = re.findall(r"^\| (`(?:GET|POST|DELETE) .*?) \| ([\w ]+) \|", text("operators.md"), re.MULTILINE)
    words = {"reader": "viewer", "anyone": "a token"}
    needed = {re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), f"{m} {p}"): n for (m, p), n in NEEDS.items()}
    for row, role in rows:
        first = row.split("`")[1]
        wanted = words.get(needed[first], needed[first])
        assert role == ("anyone" if first == "GET /v1/session" else wanted), first


def test_every_refusal_is_in_the_specification():
    """Each code that a peer may be refused with, found in the source."""
    codes = {swarm.TICKET_CODE, swarm.LACKING_CODE, LedgerUnavailable("").code}
    for path in [*(ROOT / "p2p").glob("*.py"), *(ROOT / "coordinator").glob("*.py")]:
        if path.name in REST_ONLY:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="Refused"), args=[ast.Constant(value=code), *_]):
                    codes.add(code)
    table = text("wire.md").split("### Codes of refusals")[1].split("\n## ")[0]
    listed = {
        code for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for code in re.findall(r"`([^`]+)`", row)
    }
    assert codes <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_named_exist(page):
    """Relative links resolve; paths of source files between backticks are files."""
    content = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", content):
        assert (page.parent / target).exists(), target
    for path in re.findall(
        r"`((?:node|coordinator|learner|p2p|tasks|packaging|tests)/[\w/.-]+\.(?:py|md|txt))`", content
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_within_a_page_exist(page):
    """Each link to a heading of the same page finds it."""
    content = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", content, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", content)) <= anchors
