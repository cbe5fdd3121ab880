"""The commands of a researcher: `echo2 submit`, `echo2 watch`, `echo2 export`. Added to the app of `cli`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import trio
import typer

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import refuse_used

from .rest_client import COORDINATOR_URL, RestClient, read_token

if TYPE_CHECKING:
    from .submit import Written
    from .views import PoolView

LOOK_SECONDS = 2.0

CoordinatorOption = Annotated[str, typer.Option(metavar="URL", help="the coordinator's REST address")]
TokenOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="the operator's token, in a file of mode 0600; off loopback only")
]


def submit(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="the run: task, model, objective, numbers")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="settings, forecast, what nodes see; writes nothing")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="an empty folder for the settings and keys")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="over the file, as in run.S=6")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="URL", help="a running pool, for its measured speed")
    ] = None,
    token_file: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="the report as one JSON object")] = False,
) -> None:
    """Judge a run before it costs anything, and make from it what coordinator and learner start with."""
    if not dry_run and out is None:
        raise ConfigurationError("say --dry-run to see what the run would be, or --out DIR to make its settings")
    if dry_run and out is not None:
        raise ConfigurationError("--dry-run writes nothing: leave out one of --dry-run and --out")
    if out is not None:
        refuse_used(out, "name another; nothing was changed")
    if sys.stderr.isatty():  # in a file or a pipe stderr is for what is wrong
        print("loading the task, the model's tokenizer and the learner's program ...", file=sys.stderr, flush=True)
    from .preview import look
    from .submit import ask_learner, read_submission, report, write_folder
    from .submit_text import text_of

    flags = setting or []
    submission, learner = read_submission(run_file, flags, check=ask_learner)
    pool = None if coordinator is None else _pool(coordinator, token_file)
    shown = report(submission, learner, trio.run(look, submission.file.run), pool)
    if as_json:
        print(json.dumps(shown.as_json()))
    else:
        print(text_of(shown))
    if out is not None:
        _tell(write_folder(out, run_file, flags, shown))


def _tell(written: Written) -> None:
    """On stderr: the report alone is the output. The token is on the terminal once, and in no file."""
    lines = ["", "Next:", *(f"  {command}" for command in written.commands)]
    lines += [f"note: {note}" for note in written.notes]
    lines.append(f"operator's token: {written.token}   (shown only now; only its hash is kept)")
    print("\n".join(lines), file=sys.stderr)


def _pool(url: str, token_file: Path | None) -> PoolView:
    with closing(RestClient(url, None if token_file is None else read_token(token_file))) as client:
        return client.pool()


def watch(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="its name; may be left out")] = "",
    coordinator: CoordinatorOption = COORDINATOR_URL,
    token_file: TokenOption = None,
    once: Annotated[bool, typer.Option("--once", help="one look, then end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON object a look, one a line")] = False,
    seconds: Annotated[float, typer.Option(min=0.2, help="between two looks")] = LOOK_SECONDS,
) -> None:
    """Show a run until it is over: reward, staleness, bubble, pool, rollouts, nodes, and what is waited for.

    Exit code 1 when the run was stopped before its end.
    """
    from .watch import watch as watch_run

    with closing(RestClient(coordinator, None if token_file is None else read_token(token_file))) as client:
        code = watch_run(client, run, once=once, as_lines=as_json, seconds=seconds, sleep=time.sleep, out=sys.stdout)
    raise typer.Exit(code)


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="its name")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder for the files")],
    config: Annotated[
        Path | None, typer.Option(help="the coordinator's settings file", show_default="coordinator.toml")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="token ids and log-probabilities too")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="into a folder that is not empty, over an earlier export")
    ] = False,
) -> None:
    """Write a run's rollouts (JSONL), steps and evaluations (CSV) and plots (PNG). The coordinator may be running."""
    from .config import load_config
    from .created_runs import created_runs, with_created
    from .database import read_password
    from .export_plots import draw
    from .export_run import export_run
    from .ledger import open_ledger_to_read

    if config is None:
        config = Path("coordinator.toml")
        if not config.exists():
            raise ConfigurationError(
                f"there is no settings file {config} here; name it with --config, as in --config DIR/{config}"
            )
    if not overwrite:
        refuse_used(out, "name another, or take --overwrite to replace an earlier export")
    settings = load_config(config)
    found = settings.named(run)
    if found is None:
        with closing(
            open_ledger_to_read(settings.ledger_url, password=read_password(settings.database_password_file))
        ) as ledger:
            found = with_created(settings, created_runs(ledger)).named(run)
    if found is None:
        names = ", ".join(repr(each.name) for each in settings.all_runs)
        raise ConfigurationError(f"{config} is of the run {names}, not of {run!r}")

    def tell(count: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{count} rollouts", end="", file=sys.stderr, flush=True)

    async def write() -> None:
        password = read_password(settings.database_password_file)
        url = settings.ledger_url
        exported = await export_run(found, url, out, arrays=tokens, password=password, tell=tell)
        draw(out, exported, title=f"{run}, {found.task}")
        print(
            f"{out}: {exported.rollouts} rollouts, {len(exported.steps)} steps, {len(exported.evaluations)} evaluations"
        )

    trio.run(write)
