"""`echo2-node`: take part in a run with this machine, see what it does, tell it to pause, go on or finish."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import trio
import typer

from echo2.p2p.daemon import (
    EXIT_FAILED,
    STATUS_FILE,
    configure_logging,
    is_in_use,
    lock_state_dir,
    read_status,
    run_cli,
    run_daemon,
    stoppable,
    write_status,
)
from echo2.p2p.disk_store import DiskStore
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import load_or_create_identity
from echo2.p2p.join import JoinString, parse_join_string
from echo2.p2p.settings import home_path, make_settings, read_text, read_toml
from echo2.tasks.scorer import ITEM_SECONDS_MAX, ProcessScorer

from .appeals import listed, new_appeal
from .commands import HOME_DEFAULT, FileCommands, command_line
from .config import NodeSettings
from .home import home_mark, remember_join, remember_name, remembered_join, remembered_name
from .papers import Papers, kept_statements
from .process_engine import ProcessEngine
from .receipts import checked, coordinator_of, kept_receipts
from .service import NodeService
from .spool import Spool
from .statements import faults, gaps, lines, opened, read_statement, reconciled
from .status import NodeStatus, table

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_FILE = "identity.key"
SPOOL_FILE = "spool.sqlite"
PAPERS_FILE = "papers.sqlite"
SNAPSHOTS_FOLDER = "snapshots"

SETTINGS_FILE = "node.toml"
"""In the home: what may also be said on the command line, which goes before it."""

JOIN_BYTES_MAX = 4096
"""Longer than any join string; a file named by mistake is not read whole."""

NAME_DEFAULT = "node"

STATUS_AGE_SECONDS_MAX = 10.0
"""The daemon writes its status each second; one older than this says nothing of now."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Home = Annotated[Path, typer.Option("--home", help="Folder of this node: its key, spool and snapshots.")]


def main() -> None:
    """Entry point."""
    run_cli(app)


@app.command()
def run(
    ctx: typer.Context,
    join: Annotated[
        str,
        typer.Option(
            "--join",
            help="The join string you were given (echo2://...), or @FILE that holds it; the node remembers it.",
            show_default=False,
        ),
    ] = "",
    home: Home = HOME_DEFAULT,
    name: Annotated[
        str | None,
        typer.Option(help="What the node is called in lists; the node remembers it.", show_default="node"),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Address to be reached at, such as /ip4/0.0.0.0/tcp/4001; none: dial out only."),
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Address to tell others instead, behind a forwarded port.")
    ] = None,
    upload_mbit: Annotated[
        float | None, typer.Option(help="Most Mbit/s to send, all peers together; none: no cap.")
    ] = None,
    download_mbit: Annotated[float | None, typer.Option(help="Most Mbit/s to receive; none: no cap.")] = None,
    price_hour: Annotated[
        float, typer.Option(help="Dollars an hour to be paid, if the operator pays; 0: as a volunteer.")
    ] = 0.0,
    threads: Annotated[int, typer.Option(help="Processor threads for generating.")] = 1,
    batch: Annotated[int, typer.Option(help="Most samples in hand for one batch.")] = 1024,
    sequences: Annotated[int, typer.Option(help="Samples generated side by side, up to 256.")] = 256,
    cache_mib: Annotated[int, typer.Option(help="Most MiB for the key-value cache.")] = 512,
    gpu_layers: Annotated[int, typer.Option(help="Model layers on the GPU; -1 = all, 0 = none.")] = -1,
    snapshots_kept: Annotated[int, typer.Option(help="Snapshots kept on disk.")] = 2,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="json or text; unset: text on a terminal, else json.")] = "",
) -> None:
    """Take part in a run until stopped (Ctrl-C, SIGTERM) or told to finish."""
    folder = home_path(home)
    parsed = parse_join_string(_join_text(join) if join else remembered_join(folder))
    said = {
        "name": name if name is not None else remembered_name(folder) or NAME_DEFAULT,
        "listen": listen or [],
        "announce": announce or [],
        "upload_mbit": upload_mbit,
        "download_mbit": download_mbit,
        "price_hour": price_hour,
        "threads": threads,
        "batch": batch,
        "sequences": sequences,
        "cache_mib": cache_mib,
        "gpu_layers": gpu_layers,
        "snapshots_kept": snapshots_kept,
    }
    settings = _settings(folder / SETTINGS_FILE, said, ctx)
    if log_level.lower() not in {"debug", "info", "warning", "error"}:
        raise ConfigurationError(f"--log-level {log_level}: use debug, info, warning or error")
    configure_logging("node", log_level, log_format)
    with stoppable(), lock_state_dir(folder):

        async def serve() -> None:
            await _serve(settings, parsed, folder)

        run_daemon(serve)


def _settings(path: Path, said: Mapping[str, object], ctx: typer.Context) -> NodeSettings:
    """The settings in the home, where there are any; what is said on the command line goes before them."""
    if not path.exists():
        return make_settings(said, NodeSettings, source="the command line")
    kept = read_toml(path)
    make_settings(kept, NodeSettings, source=str(path))  # its own mistakes are told under its own name
    unsaid = {name for name in kept if name in said and _is_default(ctx, name)}
    chosen = {name: kept[name] if name in unsaid else value for name, value in said.items()}
    return make_settings(dict(kept) | chosen, NodeSettings, source=f"the command line and {path}")


def _is_default(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def _join_text(join: str) -> str:
    """The join string itself. From a file, its token stays out of the list of processes that everyone can read."""
    if not join.startswith("@"):
        return join
    try:
        return read_text(Path(join[1:]), "join string", bytes_max=JOIN_BYTES_MAX)
    except ConfigurationError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise ConfigurationError(f"--join {join}: there is no file {join[1:]}") from error
        raise ConfigurationError(f"--join {join}: the file cannot be read: {error}") from error


class _Show:
    """Writes the status file; once the coordinator has spoken, also the join string and the node's name, so that they
    need not be said again.

    Not before: a mistyped one is not kept.
    """

    def __init__(self, home: Path, join: JoinString, name: str) -> None:
        self._home = home
        self._join: JoinString | None = join
        self._name = name

    def __call__(self, status: NodeStatus) -> None:
        write_status(self._home / STATUS_FILE, status)
        if self._join is not None and status.node_state:
            remember_join(self._home, self._join)
            remember_name(self._home, self._name)
            self._join = None


async def _serve(settings: NodeSettings, join: JoinString, home: Path) -> None:
    from echo2.p2p.libp2p_transport import open_libp2p_transport  # takes seconds to load
    from echo2.p2p.nat import NatNode

    identity = load_or_create_identity(home / KEY_FILE)
    spool = Spool(home / SPOOL_FILE)
    papers = Papers(home / PAPERS_FILE)
    engine = ProcessEngine(settings.engine)
    sandbox = ProcessScorer([], ITEM_SECONDS_MAX, wrap=None, hash_seed=0)  # its process starts with the first episode
    try:
        async with open_libp2p_transport(
            identity, settings.listen, announce=settings.announce, limits=settings.limits, state_dir=home
        ) as transport:
            # Before the first dial: it adds the relay to the ways of reaching a peer.
            nat = NatNode(transport, join.coordinator, clock=trio.current_time, wall=time.time)
            service = NodeService(
                config=settings,
                identity=identity,
                transport=transport,
                join=join,
                engine=engine,
                store=DiskStore(home / SNAPSHOTS_FOLDER),
                spool=spool,
                papers=papers,
                clock=trio.current_time,
                rng=random.SystemRandom(),
                commands=FileCommands(home),
                network=transport.view,
                nat=nat,
                sandbox=sandbox,
                home=home_mark(home, os.urandom),
                show=_Show(home, join, settings.name),
                software=f"echo2-node {version('echo2')}",
            )
            transport.tell_apart(service.knows)
            try:
                await service.run()
            finally:
                with trio.CancelScope(shield=True):
                    await service.goodbye()
    finally:
        await engine.close()
        await sandbox.close()
        spool.close()
        papers.close()


@app.command()
def status(
    home: Home = HOME_DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="The whole status as JSON.")] = False,
) -> None:
    """Show what the node in this home does, what was accepted, and what it waits for."""
    path = _existing(home) / STATUS_FILE
    found = read_status(path)
    if found is None:
        raise ConfigurationError(f"no node has run in {path.parent} yet; start one with `{command_line('run', home)}`")
    age = time.time() - path.stat().st_mtime
    running = is_in_use(path.parent)
    if as_json:
        typer.echo(json.dumps(found | {"running": running}, indent=1))
        return
    rows = table(found)
    if not running:
        rows.insert(0, ("not running", f"last seen {age:.0f} s ago; what follows is from then"))
    elif age > STATUS_AGE_SECONDS_MAX:
        rows.insert(0, ("running", f"but its status is {age:.0f} s old: it is stuck, or this disk takes no more"))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        typer.echo(f"{label:<{width}}  {text}")


@app.command()
def receipts(
    home: Home = HOME_DEFAULT,
    coordinator: Annotated[
        str, typer.Option(help="Peer id of the coordinator that signed; that of the join string unless said.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a receipt.")] = False,
) -> None:
    """List the receipts kept here and verify them, without the network. Exit 1 when one is not what was signed."""
    folder = _existing(home)
    signer = coordinator or coordinator_of(folder)
    kept = checked(kept_receipts(folder / SPOOL_FILE), signer, load_or_create_identity(folder / KEY_FILE).peer_id)
    for line in kept.lines(as_json=as_json):
        typer.echo(line)
    typer.echo(kept.verdict(signer), err=True)
    if kept.bad:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def statement(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Statements that the operator sent.")
    ] = None,
    home: Home = HOME_DEFAULT,
    coordinator: Annotated[
        str, typer.Option(help="Peer id of the coordinator that signed; that of the join string unless said.")
    ] = "",
) -> None:
    """Check signed statements of credits and pay, without the network. Exit 1 when something is wrong.

    Without files: those that the node fetched, and whether they agree with its receipts. Of several, also that they do
    not contradict each other: give those that you kept, with the newest.
    """
    folder = _existing(home)
    signer = coordinator or coordinator_of(folder)
    peer = load_or_create_identity(folder / KEY_FILE).peer_id
    kept = kept_statements(folder / PAPERS_FILE, signer)
    if not files and not kept:
        typer.echo("no statement was fetched yet: the node asks for one when it joins, and each five minutes", err=True)
        return
    found = [read_statement(path, signer) for path in files] if files else opened(kept, signer)
    for line in lines(found):
        typer.echo(line)
    wrong = faults(found, peer)
    if not files:
        wrong += gaps(found)
        for line in reconciled(found, checked(kept_receipts(folder / SPOOL_FILE), signer, peer)):
            typer.echo(line)
    typer.echo("; ".join(f"NOT RIGHT: {fault}" for fault in wrong) or f"signed by {signer}, and unaltered", err=True)
    if wrong:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def appeal(
    about: Annotated[str, typer.Argument(metavar="LEASE-ID|suspension", help="As `receipts` lists it.")],
    text: Annotated[str, typer.Argument(help="Why, in at most 1024 characters.")],
    home: Home = HOME_DEFAULT,
) -> None:
    """Tell the operator that a rejected lease, or the suspension of this node, was not right.

    It is kept in the home; the node sends it. `appeals` shows what became of it.
    """
    folder = _existing(home)
    join = parse_join_string(remembered_join(folder))
    made = new_appeal(join, about, text, os.urandom(16))
    with closing(Papers(folder / PAPERS_FILE)) as papers:
        papers.add_appeal(made)
    typer.echo(f"kept; the node sends it while it runs. `{command_line('appeals', home)}` shows the answer")


@app.command()
def appeals(home: Home = HOME_DEFAULT) -> None:
    """List this node's appeals: unsent, open, upheld, refused or declined, with the answer."""
    path = _existing(home) / PAPERS_FILE
    if not path.exists():
        typer.echo("no appeals")
        return
    with closing(Papers(path)) as papers:
        for line in listed(papers.appeals()):
            typer.echo(line)


@app.command()
def pause(home: Home = HOME_DEFAULT) -> None:
    """Generate nothing more until `resume`, also after a restart. What is in hand is completed and sent."""
    FileCommands(_existing(home)).write("pause")
    typer.echo(f"paused; go on with `{command_line('resume', home)}`")


@app.command()
def resume(home: Home = HOME_DEFAULT) -> None:
    """Go on after `pause`, or take back a `finish` that is not done yet."""
    FileCommands(_existing(home)).write("run")
    typer.echo("resumed")


@app.command()
def finish(home: Home = HOME_DEFAULT) -> None:
    """Complete what is in hand, send everything, collect the receipts that are due, then stop."""
    FileCommands(_existing(home)).write("finish")
    typer.echo(f"finishing; `{command_line('status', home)}` shows how far it is")


def _existing(home: Path) -> Path:
    folder = home_path(home)
    if not folder.is_dir():
        raise ConfigurationError(f"there is no node home {folder}; is --home right?")
    return folder


if __name__ == "__main__":
    main()
