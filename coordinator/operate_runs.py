"""`echo2-coordinator runs ...`: what the run does, what is done to it, and run files judged by the coordinator."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from pydantic import TypeAdapter

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import read_text

from . import operate_text as text
from .operate import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    TokenOption,
    UrlOption,
    console,
    place,
    show,
)
from .run_file import toml_text

RUN_FILE_BYTES_MAX = 64 * 1024
"""As much as REST takes."""

TOML = "application/toml"

runs_app = typer.Typer(
    no_args_is_help=False, help="The runs: list, show, create, pause, resume, stop; and run files judged."
)

RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="its name; may be left out")]
FileArgument = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="a run file, as `echo2 submit` takes it")]
WhyOption = Annotated[str, typer.Option("--reason", help="kept in the audit log")]

CHANGES = {
    "start": "Let leases flow; a run that is not paused stays as it is.",
    "pause": "No new leases until resumed; what is out is still taken, scored and trained on.",
    "resume": "Leases of a paused run flow again.",
    "stop": "For good: no new leases, the learner ends its step and says what it trained on.",
}


@runs_app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs, or what can be done to one."""
    if context.invoked_subcommand is None:
        listed(config, coordinator, token_file, as_json)


@runs_app.command("list")
def listed(
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs."""
    with place(config, coordinator, token_file).asking() as client:
        found = client.get("/v1/runs")
    show(found, as_json, text.runs_table(found, width=console().width))


@runs_app.command("show")
def shown(
    run: RunArgument = "",
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run: its state, what it waits for, reward, staleness, bubble, rollouts, evaluations."""
    with place(config, coordinator, token_file).asking() as client:
        found = client.get(f"/v1/runs/{client.run_name(run)}")
    show(found, as_json, text.run_table(found))


@runs_app.command()
def validate(
    run_file: FileArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask whether a run file is in order. Exit code 1 when it is not."""
    content = _run_file(run_file)
    with place(config, coordinator, token_file).asking() as client:
        found = client.send_text("/v1/runs/validate", content, TOML)
    rows = [(one["key"], text.printable(str(one["value"])), one["origin"]) for one in found["settings"]]
    said = (
        text.rows_table(("key", "value", "from"), rows) if found["valid"] else text.facts({}, trouble=found["problem"])
    )
    show(found, as_json, said)
    if not found["valid"]:
        raise typer.Exit(1)


@runs_app.command()
def create(
    run_file: FileArgument,
    reason: WhyOption = "",
    learner: Annotated[
        Path | None, typer.Option(metavar="LEARNER.TOML", help="write what its learner starts with into this file")
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have the coordinator serve one run more, which shares its pool by weight. Its learner is started by hand."""
    content = _run_file(run_file)
    if learner is not None and learner.exists():
        raise ConfigurationError(f"{learner} is already there; nothing was done")
    path = f"/v1/runs?{urlencode({'reason': reason})}" if reason else "/v1/runs"
    with place(config, coordinator, token_file).asking() as client:
        found = client.send_text(path, content, TOML)
    if learner is not None:
        learner.write_text(found["learner_toml"], encoding="utf-8")
    if as_json:
        show(found, as_json, None)
        return
    run = found["run"]
    print(f"{run['run']} is {run['state']}, of weight {run['weight']:g}; {text.printable(found['next'])}")
    if learner is None:
        print(f"\nlearner.toml:\n{found['learner_toml']}")


@runs_app.command()
def estimate(
    run_file: FileArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask what a run would be on this pool: time, price, staleness, warnings, and what nodes would see."""
    content = _run_file(run_file)
    with place(config, coordinator, token_file).asking() as client:
        found = client.send_text("/v1/runs/estimate", content, TOML)
    if as_json:
        show(found, as_json, None)
    else:
        print(_in_words(found))


def _run_file(path: Path) -> str:
    """The file's text as the coordinator takes it: with its own model, so without `model_dir`, which is said on stderr.

    Text that is no TOML is left as it is: the coordinator says what is wrong with it. Raises ConfigurationError.
    """
    content = read_text(path, "run file", bytes_max=RUN_FILE_BYTES_MAX)
    try:
        tables = tomllib.loads(content)
    except tomllib.TOMLDecodeError:
        return content
    run = tables.get("run")
    if not isinstance(run, dict) or "model_dir" not in run:
        return content
    print(f"note: run.model_dir of {path} is not used: the model is the coordinator's own", file=sys.stderr)
    return toml_text({**tables, "run": {key: value for key, value in run.items() if key != "model_dir"}})


def _in_words(found: dict[str, Any]) -> str:
    """As `echo2 submit --dry-run` says it."""
    from .estimate import Forecast, Supply
    from .preview import Seen
    from .submit import Report
    from .submit_text import text_of

    return text_of(
        Report(
            resolved=tuple((one["key"], one["value"], one["origin"]) for one in found["settings"]),
            seen=TypeAdapter(Seen).validate_python(found["nodes_see"]),
            supply=TypeAdapter(Supply | None).validate_python(found["supply"]),
            forecast=TypeAdapter(Forecast | None).validate_python(found["forecast"]),
            missing=tuple(found["missing"]),
            warnings=tuple(found["warnings"]),
        )
    )


def _add(verb: str, summary: str) -> None:
    def carry_out(
        run: RunArgument = "",
        reason: WhyOption = "",
        config: ConfigOption = DEFAULT_CONFIG,
        coordinator: UrlOption = None,
        token_file: TokenOption = None,
        as_json: JsonOption = False,
    ) -> None:
        if verb == "stop" and not reason:
            raise ConfigurationError("stop is for good: say why with --reason")
        with place(config, coordinator, token_file).asking() as client:
            body = {"reason": reason} if reason else {}
            found = client.change(f"/v1/runs/{client.run_name(run)}/{verb}", body)
        if as_json:
            show(found, as_json, None)
        else:
            print(f"{found['run']} is {found['state']}; it waits for: {text.printable(found['waiting']) or 'nothing'}")

    runs_app.command(verb, help=summary)(carry_out)


for _verb, _summary in CHANGES.items():
    _add(_verb, _summary)
