"""The `echo2-coordinator` command."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo2.p2p.daemon import configure_logging, lock_state_dir, run_cli, run_daemon, stoppable
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.p2p.identity import load_or_create_identity
from echo2.p2p.join import ANY_RUN, JoinString
from echo2.p2p.settings import load_settings

from .access_commands import access_app, open_beside
from .addresses import known_addresses
from .config import (
    IDENTITY_FILE,
    OPERATOR_TOKEN_FILE,
    TOKEN_HOURS_MAX,
    TOKEN_USES_MAX,
    StatePlace,
    load_config,
)
from .ledger_commands import backup, ledger_app, restore
from .operate import decisions, events, pool
from .operate_nodes import nodes_app
from .operate_runs import runs_app
from .operator_token import make_operator_token
from .template import TEMPLATE

if TYPE_CHECKING:
    from .config import CoordinatorConfig
    from .ledger import Ledger

SETTINGS_FILE = "coordinator.toml"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
token_app = typer.Typer(no_args_is_help=True, help="Tokens that let volunteers in.")
app.add_typer(token_app, name="token")
app.add_typer(access_app, name="access")
app.add_typer(nodes_app, name="nodes")
app.add_typer(runs_app, name="runs")
app.add_typer(ledger_app, name="ledger")

ConfigOption = Annotated[Path, typer.Option("--config", help="the settings file")]
RunOption = Annotated[str, typer.Option("--run", help="the only run that it is for; '*': any, and nodes may be moved")]


@app.callback()
def coordinator() -> None:
    """Run a pool: admit nodes, lease prompts, check and record rollouts."""


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new or empty folder")]) -> None:
    """Write a settings file with comments, make a key and an operator's token."""
    path = folder / SETTINGS_FILE
    if path.exists():
        raise ConfigurationError(f"{path} is already there; nothing was changed")
    state = folder / "state"
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigurationError(f"cannot write to the folder {folder}: {error.strerror}") from error
    identity = load_or_create_identity(state / IDENTITY_FILE)
    token = make_operator_token(state / OPERATOR_TOKEN_FILE)
    try:
        path.write_text(TEMPLATE, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    print(f"settings:         {path}   (fill in [run], then: echo2-coordinator serve --config {path})")
    print(f"peer id:          {identity.peer_id}")
    print(f"operator's token: {token}   (shown only now; only its hash is kept)")


@app.command()
def serve(
    config: ConfigOption = Path(SETTINGS_FILE),
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
    log_format: Annotated[str, typer.Option(help="json or text; unset: text on a terminal, else json")] = "",
) -> None:
    """Serve until stopped (SIGTERM or Ctrl-C)."""
    if log_level not in {"debug", "info", "warning", "error"}:
        raise ConfigurationError(f"--log-level {log_level} is not debug, info, warning or error")
    settings = load_config(config)
    configure_logging("echo2-coordinator", log_level, log_format)
    with stoppable(), lock_state_dir(settings.state_dir):
        from .serve import serve as serve_coordinator  # libp2p and the web framework take seconds to load

        run_daemon(partial(serve_coordinator, settings))


@app.command()
def identity(config: ConfigOption = Path(SETTINGS_FILE)) -> None:
    """Print the coordinator's peer id. Works before the settings are filled in."""
    print(load_or_create_identity(load_settings(config, StatePlace).identity_path).peer_id)


@token_app.command("create")
def token_create(
    config: ConfigOption = Path(SETTINGS_FILE),
    uses: Annotated[int, typer.Option(min=1, max=TOKEN_USES_MAX, help="nodes it lets in")] = 1,
    expires_hours: Annotated[float, typer.Option(min=0.01, max=TOKEN_HOURS_MAX, help="how long")] = 72.0,
    run: RunOption = "",
) -> None:
    """Print a join string: the one thing a volunteer needs. Works while the coordinator runs, and before."""
    from .tokens import issue_token

    settings = load_config(config)
    addresses = known_addresses(settings)
    peer = load_or_create_identity(settings.identity_path).peer_id
    with open_beside(settings) as ledger:
        named = _run_of(settings, ledger, run)
        token = issue_token(
            ledger,
            uses=uses,
            expires_seconds=expires_hours * 3600,
            wall=time.time(),
            entropy=os.urandom,
            actor="command line",
            reason="echo2-coordinator token create",
            run=run if run not in {"", ANY_RUN} else None,
        )
    print(JoinString(peer=peer, addresses=addresses, token=token, run=named))


@app.command()
def join(config: ConfigOption = Path(SETTINGS_FILE), run: RunOption = "") -> None:
    """Print the join string without a token, for a pool that is open or whose nodes are admitted by hand."""
    settings = load_config(config)
    if settings.admission.mode == "token":
        raise ConfigurationError(
            'this pool lets nodes in by token: use `echo2-coordinator token create`, or set mode = "open" or "hand" '
            "under [admission]"
        )
    peer, addresses = load_or_create_identity(settings.identity_path).peer_id, known_addresses(settings)
    with open_beside(settings) as ledger:
        named = _run_of(settings, ledger, run)
    print(JoinString(peer=peer, addresses=addresses, token="", run=named))


@token_app.command("list")
def token_list(config: ConfigOption = Path(SETTINGS_FILE)) -> None:
    """Print every token made: the start of its hash, how often it was used, until when it counts."""
    from .tokens import list_tokens

    with open_beside(load_config(config)) as ledger:
        rows = list_tokens(ledger)
    print(f"{'sha-256':<14}{'used':>6}{'of':>6}  {'made':<21}{'expires':<21}run")
    for row in rows:
        expires = "never" if row.expires is None else _moment(row.expires)
        times = f"{_moment(row.created):<21}{expires:<21}"
        print(f"{row.hash_start:<14}{row.used:>6}{row.uses:>6}  {times}{row.run or 'any'}")


@token_app.command("operator")
def token_operator(config: ConfigOption = Path(SETTINGS_FILE)) -> None:
    """Make a new operator's token and print it; the old one is void once the coordinator is restarted."""
    print(make_operator_token(load_settings(config, StatePlace).operator_token_path))


@token_app.command("revoke")
def token_revoke(
    token: Annotated[str, typer.Argument(metavar="SHA-256", help="the start of its hash, as `token list` prints it")],
    config: ConfigOption = Path(SETTINGS_FILE),
    reason: Annotated[str, typer.Option(help="kept in the audit log")] = "echo2-coordinator token revoke",
) -> None:
    """End a token that lets nodes in; those that are in stay."""
    from .tokens import revoke_token

    with open_beside(load_config(config)) as ledger:
        try:
            revoke_token(ledger, token, wall=time.time(), actor="command line", reason=reason)
        except KeyError as error:
            raise ConfigurationError(f"there is no token {token[:64]!r}; token list shows them") from error
        except Refused as error:
            raise ConfigurationError(error.detail) from error
    print(f"the token {token} lets nobody in any more")


for command in (pool, events, decisions, backup, restore):
    app.command()(command)


def _run_of(settings: CoordinatorConfig, ledger: Ledger, run: str) -> str:
    """What a join string says of the run. Raises ConfigurationError for one that is not there."""
    from .created_runs import created_runs

    names = dict.fromkeys([*(one.name for one in settings.all_runs), *created_runs(ledger)])
    if run and run != ANY_RUN and run not in names:
        raise ConfigurationError(f"there is no run {run!r}; there is {', '.join(names)}")
    return run or (next(iter(names)) if len(names) == 1 else ANY_RUN)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def main() -> None:
    """Entry point of the `echo2-coordinator` command."""
    run_cli(app)


if __name__ == "__main__":
    main()
