"""`echo2-coordinator pool | nodes | runs | events | decisions`: a running coordinator, asked over REST.

On its own machine the settings file says where it is, and the state folder holds a token for as long as it runs. From
elsewhere: `--coordinator URL --token-file FILE`.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from echo2.p2p.daemon import STATUS_FILE, read_status
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import load_settings

from . import operate_text as text
from .config import RestPlace
from .node_naming import one_node
from .rest_client import NoAnswer, RestClient, read_token
from .rest_tls import client_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

DEFAULT_CONFIG = Path("coordinator.toml")

ConfigOption = Annotated[Path, typer.Option("--config", metavar="FILE", help="the coordinator's settings file")]
UrlOption = Annotated[
    str | None, typer.Option("--coordinator", metavar="URL", help="where it is, if not on this machine")
]
TokenOption = Annotated[Path | None, typer.Option(metavar="FILE", help="an access token, in a file of mode 0600")]
JsonOption = Annotated[bool, typer.Option("--json", help="for programs: as REST answers it")]
ReasonOption = Annotated[str, typer.Option("--reason", help="kept in the audit log")]


@dataclass(frozen=True, slots=True)
class Place:
    """Where to ask, as the options say."""

    config: Path
    url: str | None
    token_file: Path | None

    @contextmanager
    def asking(self) -> Iterator[RestClient]:
        """A client of the coordinator. Raises ConfigurationError."""
        if self.url is not None:
            client = RestClient(self.url, None if self.token_file is None else read_token(self.token_file))
        else:
            client = self._of_this_machine()
        try:
            yield client
        except NoAnswer as error:
            if self.url is None and "does not answer" in str(error):
                raise NoAnswer(f"{error} (is it running? echo2-coordinator serve --config {self.config})") from error
            raise
        finally:
            client.close()

    def _of_this_machine(self) -> RestClient:
        if not self.config.exists():
            raise ConfigurationError(
                f"there is no settings file {self.config} here; name it with --config, or the coordinator with "
                "--coordinator URL"
            )
        place = load_settings(self.config, RestPlace)
        url = place.rest.url
        if not place.rest.port:
            url = str((read_status(place.state_dir / STATUS_FILE) or {}).get("rest", url))
        token = None
        if self.token_file is not None:
            token = read_token(self.token_file)
        elif place.local_token_path.exists():
            token = read_token(place.local_token_path)
        certificate = place.rest.certificate
        return RestClient(url, token, tls=None if certificate is None else client_context(certificate))


def place(
    config: ConfigOption = DEFAULT_CONFIG, coordinator: UrlOption = None, token_file: TokenOption = None
) -> Place:
    """The three options that every command has."""
    return Place(config, coordinator, token_file)


def show(found: Any, as_json: bool, table: RenderableType | None) -> None:
    """One answer, for people or for programs."""
    if as_json:
        print(json.dumps(found))
    else:
        console().print(table)


def console() -> Console:
    """The terminal, or a file or pipe, in which nothing is cut for want of room."""
    return Console() if sys.stdout.isatty() else Console(width=Console().width)


def pool(
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the pool as a whole: nodes by health, its speed and the speed needed, what was refused and why."""
    with place(config, coordinator, token_file).asking() as client:
        found = client.get("/v1/pool")
    show(found, as_json, text.pool_table(found))


def decisions(
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List which paid nodes were activated and released, and why; the newest first."""
    with place(config, coordinator, token_file).asking() as client:
        found = client.get("/v1/decisions")
    show(found, as_json, text.decisions_table(found))


def events(
    follow: Annotated[bool, typer.Option("--follow", help="go on showing them as they come")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="of the last ones")] = 50,
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the audit log: who did what to whom, and why; the oldest of those shown first."""
    with place(config, coordinator, token_file).asking() as client:
        found = list(client.rows("/v1/events", limit))[::-1]
        if not follow:
            show(found, as_json, text.events_table(found, width=console().width))
            return
        last = found[-1]["id"] if found else 0
        for event in found:
            _tell(event, as_json)
        while True:  # a stream ends by itself after a while; the next one goes on where it did
            for last, event in client.follow("/v1/events/stream", last):  # noqa: B007, B020 - it is used in the next
                _tell(event, as_json)


def _tell(event: Any, as_json: bool) -> None:
    line = json.dumps(event) if as_json else "  ".join(map(text.printable, text.event_cells(event)))
    print(line, flush=True)


def peer_of(client: RestClient, said: str) -> str:
    """The peer id of a node: as said, or by its name or its end where that is one node's alone.

    Raises ConfigurationError.
    """
    return one_node(said, ((str(node["peer"]), str(node["name"])) for node in client.rows("/v1/nodes")))
