"""`echo2-coordinator backup | restore | ledger ...`: the ledger's copies, and its chain of credits and payments."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing, contextmanager, nullcontext
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import load_or_create_identity
from echo2.p2p.postings import Unit

from .config import CoordinatorConfig, load_config
from .node_naming import one_node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    import sqlalchemy as sa

MICROS = 1_000_000

PEER_ID_CHARACTERS_MIN = 40
"""What is as long as this was meant as a whole peer id, and is not looked up as a name."""

ledger_app = typer.Typer(no_args_is_help=True, help="Credits and payments: a chain that anybody can check.")

ConfigOption = Annotated[Path, typer.Option("--config", help="the settings file")]
DEFAULT_CONFIG = Path("coordinator.toml")


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a new file")], config: ConfigOption = DEFAULT_CONFIG
) -> None:
    """Write the whole ledger, as it is at this moment, to one file. The coordinator may be running."""
    from .backup import write_backup

    with _reading(load_config(config)) as connection:
        made = write_backup(connection, file, wall=time.time())
    print(f"{file}: {made.rows} rows, {file.stat().st_size} bytes; it holds secrets: keep it as you keep the key")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="what `backup` wrote")],
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Put a backup into the database of the settings, which must be empty: SQLite or PostgreSQL, whatever it was."""
    from echo2.p2p.daemon import lock_state_dir

    from .backup import restore_backup
    from .database import read_password
    from .ledger import open_ledger

    settings = load_config(config)
    with lock_state_dir(settings.state_dir):
        password = read_password(settings.database_password_file)
        ledger = open_ledger(settings.ledger_url, password=password, exclusive=True)
        with closing(ledger), ledger.transaction() as connection:
            restored = restore_backup(connection, file)
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(restored.made))
    print(f"{restored.rows} rows of {moment} are restored; start the coordinator")


@ledger_app.command()
def verify(
    config: ConfigOption = DEFAULT_CONFIG,
    against: Annotated[Path | None, typer.Option(help="an earlier export (JSON) that it must go on from")] = None,
    export: Annotated[Path | None, typer.Option(help="check this export (JSON) alone, without the ledger")] = None,
    signer: Annotated[str | None, typer.Option(help="the peer id that must have signed the export")] = None,
) -> None:
    """Check every posting's hash, and that none is missing. Exit code 1, and the posting's name, when one is wrong."""
    from . import accounts

    if export is not None:
        with _opened(export) as file:
            chain, signed_by = accounts.check_export(file, signer)
        fault, told = chain.fault, f", signed by {signed_by}"
    else:
        settings = load_config(config)
        with _reading(settings) as connection:
            chain = accounts.verify(connection)
            fault, told = chain.fault, ""
            if against is not None and not fault:
                with _opened(against) as file:
                    peer = signer or load_or_create_identity(settings.identity_path).peer_id
                    earlier, _ = accounts.check_export(file, peer)
                fault = earlier.fault or accounts.extends(connection, earlier)
                told = f", which go on from the {earlier.count} of {against}"
    if fault:
        print(fault, file=sys.stderr)
        raise typer.Exit(1)
    print(f"{chain.count} postings are as they were written{told}; the newest has the hash {chain.head.hex()}")


@ledger_app.command("export")
def export_chain(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="a new file: .csv, or .json with the signed end")],
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Write the chain with its hashes."""
    from . import accounts

    if out.suffix not in {".csv", ".json"}:
        raise ConfigurationError(f"{out} ends neither with .csv nor with .json; name it so that one knows which it is")
    settings = load_config(config)
    with _reading(settings, of_postings=True) as connection, _made(out) as file:
        if out.suffix == ".csv":
            count = accounts.export_csv(connection, file)
        else:
            identity = load_or_create_identity(settings.identity_path)
            count = accounts.export_json(connection, file, identity, wall=time.time())
    print(f"{out}: {count} postings")


@ledger_app.command()
def statement(
    node: Annotated[str, typer.Argument(metavar="NODE", help="its peer id, the end of it, or its name")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="a new file")],
    config: ConfigOption = DEFAULT_CONFIG,
    after: Annotated[int, typer.Option(min=0, help="only postings behind this one")] = 0,
) -> None:
    """Sign a node's postings for its owner, who can check them anywhere."""
    from echo2.p2p.codec import encode_record

    from . import accounts

    settings = load_config(config)
    identity = load_or_create_identity(settings.identity_path)
    with _reading(settings) as connection:
        peer = _peer(connection, node)
    with _reading(settings, of_postings=True) as connection:
        signed = accounts.statement(connection, identity, peer, after=after, wall=time.time())
        owed = accounts.balances(connection, peer)
    with _made(out) as file:
        file.write(encode_record(signed).hex() + "\n")
    balances = ", ".join(f"{amount / MICROS:.6f} {unit}" for unit, amount in sorted(owed.items())) or "nothing"
    print(f"{out}: signed by {identity.peer_id}; the balance is {balances}")


@ledger_app.command()
def post(
    node: Annotated[str, typer.Argument(metavar="NODE", help="its peer id, the end of it, or its name")],
    amount: Annotated[str, typer.Option(help="such as 12.50; -12.50 takes it off")],
    reason: Annotated[str, typer.Option(help="kept with it for good")],
    unit: Annotated[Unit, typer.Option(help="of the amount")] = "credit",
    kind: Annotated[Literal["payment", "adjustment"], typer.Option(help="what it is")] = "payment",
    run: Annotated[str, typer.Option(help="the run that it is for; left out: the first of the settings")] = "",
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Post a payment or a correction, for good: only another one answers it. The coordinator may be running."""
    from . import accounts
    from .created_runs import is_known
    from .database import read_password
    from .ledger import open_ledger
    from .records import add_event

    settings = load_config(config)
    exact = micros(amount)
    url, password = settings.ledger_url, read_password(settings.database_password_file)
    with closing(open_ledger(url, password=password)) as ledger, ledger.transaction() as connection:
        peer = _peer(connection, node)
        entry = accounts.Entry(run or settings.run.name, peer, kind, unit, exact, 0, "command line", reason)
        if run and not is_known(ledger, run):
            raise ConfigurationError(f"the ledger has no run {run!r}")
        try:
            (posted,) = accounts.append(connection, [entry], wall=time.time())
        except (ValueError, OverflowError) as error:
            raise ConfigurationError(f"that cannot be posted: {error}") from error
        add_event(
            connection,
            wall=time.time(),
            actor="command line",
            action=f"{kind} posted",
            subject=peer,
            reason=f"{amount} {unit}, posting {posted.id}: {reason}",
        )
    print(f"posting {posted.id}: {amount} {unit} for {peer}, hash {posted.hash.hex()}")


def micros(amount: str) -> int:
    """An amount as people write it, in millionths, exactly. Raises ConfigurationError."""
    try:
        scaled = Decimal(amount) * MICROS
        exact = scaled.is_finite() and scaled == scaled.to_integral_value()
    except InvalidOperation:
        exact = False
    if not exact:
        raise ConfigurationError(f"{amount} is no amount with at most six decimals, such as 12.50")
    return int(scaled)


def _peer(connection: sa.Connection, said: str) -> str:
    """The peer id of a node as a person names it; a whole one need not be of a node that is known here.

    Raises ConfigurationError.
    """
    import sqlalchemy as sa

    from echo2.p2p.errors import BadSignature
    from echo2.p2p.identity import check_peer_id

    from . import schema

    try:
        return check_peer_id(said)
    except BadSignature as error:
        if len(said) >= PEER_ID_CHARACTERS_MIN:
            raise ConfigurationError(str(error)) from error
    rows = connection.execute(sa.select(schema.nodes.c.peer, schema.nodes.c.name).where(schema.nodes.c.role == "node"))
    return one_node(said, ((row.peer, row.name) for row in rows))


@contextmanager
def _reading(settings: CoordinatorConfig, *, of_postings: bool = False) -> Iterator[sa.Connection]:
    """`of_postings`: one that is not as it was written is told of as damage."""
    from . import schema
    from .database import read_password
    from .ledger import open_ledger_to_read

    password = read_password(settings.database_password_file)
    with (
        closing(open_ledger_to_read(settings.ledger_url, password=password)) as ledger,
        ledger.reading() as connection,
        ledger.loading(schema.postings) if of_postings else nullcontext(),
    ):
        yield connection


@contextmanager
def _made(path: Path) -> Iterator[TextIO]:
    """A new file, whole or not there."""
    if path.exists():
        raise ConfigurationError(f"{path} is already there; name a new file")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="") as file:
            yield file
        temporary.rename(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
