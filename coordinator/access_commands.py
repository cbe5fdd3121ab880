"""`echo2-coordinator access ...`: access tokens, made and revoked in the ledger, while the coordinator runs or before.

So the first one can be made before it starts, by whoever has its machine; from elsewhere there is `POST /v1/access`.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo2.p2p.errors import ConfigurationError, Refused

from . import operate_text as text
from .config import CoordinatorConfig, load_config
from .rest_roles import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .ledger import Ledger

DEFAULT_CONFIG = Path("coordinator.toml")

SECONDS_IN_HOUR = 3600

ConfigOption = Annotated[Path, typer.Option("--config", metavar="FILE", help="the coordinator's settings file")]

access_app = typer.Typer(no_args_is_help=True, help="Access tokens: who may ask the coordinator what, over REST.")


@contextmanager
def open_beside(config: CoordinatorConfig) -> Iterator[Ledger]:
    """The ledger, to write into beside the coordinator. Raises ConfigurationError."""
    from .database import read_password
    from .ledger import open_ledger

    try:
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write to the folder {config.state_dir}: {error.strerror}") from error
    with closing(open_ledger(config.ledger_url, password=read_password(config.database_password_file))) as ledger:
        yield ledger


@access_app.command()
def create(
    role: Annotated[Role, typer.Option(help="what it may: see, handle runs, do everything")],
    name: Annotated[str, typer.Option(help="whose it is; the audit log calls them so")],
    expires_hours: Annotated[float | None, typer.Option(min=0.01, help="for so long; else until it is revoked")] = None,
    reason: Annotated[str, typer.Option(help="kept in the audit log")] = "echo2-coordinator access create",
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Print a new access token. It is shown once; the ledger keeps its hash."""
    from .access import COMMAND_LINE, EXPIRES_HOURS_MAX, NAME_CHARACTERS_MAX, NAME_PATTERN, AccessBook

    if not re.fullmatch(NAME_PATTERN, name) or len(name) > NAME_CHARACTERS_MAX:
        raise ConfigurationError(
            f"--name {name[:64]!r}: letters, digits, '.', '_', '@' and '-', {NAME_CHARACTERS_MAX} at most"
        )
    if expires_hours is not None and expires_hours > EXPIRES_HOURS_MAX:
        raise ConfigurationError(f"--expires-hours {expires_hours:g} is above {EXPIRES_HOURS_MAX:g}; leave it out")
    with open_beside(load_config(config)) as ledger:
        book = AccessBook(ledger, own={}, wall=time.time, entropy=os.urandom)
        seconds = None if expires_hours is None else expires_hours * SECONDS_IN_HOUR
        try:
            token = book.create(name, role, expires_seconds=seconds, actor=COMMAND_LINE, reason=reason)
        except Refused as error:
            raise ConfigurationError(error.detail) from error
    print(token)


@access_app.command("list")
def listed(
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: Annotated[bool, typer.Option("--json", help="for programs: as REST answers it")] = False,
) -> None:
    """List every access token made: name, role, and whether it counts."""
    from .access import AccessBook
    from .operate import console

    with open_beside(load_config(config)) as ledger:
        rows = AccessBook(ledger, own={}, wall=time.time, entropy=os.urandom).rows()
    if as_json:
        found = [
            {
                "name": row.name,
                "role": row.role,
                "created_seconds": row.created,
                "expires_seconds": row.expires,
                "revoked_seconds": row.revoked,
            }
            for row in rows
        ]
        print(json.dumps(found))
        return
    now = time.time()
    cells = [
        (row.name, row.role, row.denied(now) or "counts", text.moment(row.created), text.moment(row.expires) or "never")
        for row in rows
    ]
    console().print(text.rows_table(("name", "role", "now", "made (UTC)", "expires (UTC)"), cells))


@access_app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="whose token")],
    reason: Annotated[str, typer.Option(help="kept in the audit log")] = "echo2-coordinator access revoke",
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """End an access token, and the sessions that it opened, at once."""
    from .access import COMMAND_LINE, OPERATOR, AccessBook

    if name == OPERATOR:
        raise ConfigurationError(
            "the operator's own token is in a file: echo2-coordinator token operator makes another"
        )
    with open_beside(load_config(config)) as ledger:
        book = AccessBook(ledger, own={}, wall=time.time, entropy=os.urandom)
        try:
            row = book.revoke(name, actor=COMMAND_LINE, reason=reason)
        except KeyError as error:
            raise ConfigurationError(
                f"{name[:64]!r} has no token that counts; echo2-coordinator access list shows them"
            ) from error
    print(f"the token of {row.name} ({row.role}) counts for nothing from now on")
