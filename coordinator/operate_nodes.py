"""`echo2-coordinator nodes ...`. Every change of `node_changes` is a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import operate_text as text
from .node_changes import CHANGES
from .node_states import NodeState
from .operate import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    ReasonOption,
    TokenOption,
    UrlOption,
    console,
    peer_of,
    place,
    show,
)
from .views import Health

if TYPE_CHECKING:
    from .node_changes import NodeChange

SECONDS_IN_HOUR = 3600

nodes_app = typer.Typer(no_args_is_help=False, help="The nodes: list, show, and what can be done to one.")

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="its peer id, the end of it, or its name")]
StateOption = Annotated[NodeState | None, typer.Option(help="only those in this state, such as suspended")]
HealthOption = Annotated[Health | None, typer.Option(help="only healthy, late or dead ones")]


@nodes_app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the nodes, or what can be done to one."""
    if context.invoked_subcommand is None:
        listed(None, None, config, coordinator, token_file, as_json)


@nodes_app.command("list")
def listed(
    state: StateOption = None,
    health: HealthOption = None,
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List every node ever admitted: verdict, health, snapshots behind, speed, rollouts, reason."""
    chosen = {name: value for name, value in (("state", state), ("health", health)) if value is not None}
    with place(config, coordinator, token_file).asking() as client:
        found = list(client.rows("/v1/nodes", None, **chosen))
    if not found and not as_json:
        said = "is like that" if chosen else "was admitted yet; echo2-coordinator token create prints a join string"
        print(f"no node {said}")
        return
    show(found, as_json, text.nodes_table(found, width=console().width))


@nodes_app.command("show")
def shown(
    node: NodeArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    coordinator: UrlOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all that is known of a node."""
    with place(config, coordinator, token_file).asking() as client:
        found = client.get(f"/v1/nodes/{peer_of(client, node)}")
    show(found, as_json, text.node_table(found))


def _add(verb: str, change: NodeChange) -> None:
    def carry_out(
        node: NodeArgument,
        reason: ReasonOption,
        config: ConfigOption = DEFAULT_CONFIG,
        coordinator: UrlOption = None,
        token_file: TokenOption = None,
        as_json: JsonOption = False,
    ) -> None:
        _change(verb, node, {"reason": reason}, (config, coordinator, token_file), as_json)

    def for_a_time(
        node: NodeArgument,
        reason: ReasonOption,
        expires_hours: Annotated[
            float | None, typer.Option(min=0.001, help="for so long; else until it is taken back")
        ] = None,
        config: ConfigOption = DEFAULT_CONFIG,
        coordinator: UrlOption = None,
        token_file: TokenOption = None,
        as_json: JsonOption = False,
    ) -> None:
        body: dict[str, Any] = {"reason": reason}
        if expires_hours is not None:
            body["expires_seconds"] = expires_hours * SECONDS_IN_HOUR
        _change(verb, node, body, (config, coordinator, token_file), as_json)

    nodes_app.command(verb, help=change.summary)(for_a_time if change.expires else carry_out)


def _change(verb: str, node: str, body: dict[str, Any], where: tuple[Any, Any, Any], as_json: bool) -> None:
    with place(*where).asking() as client:
        found = client.change(f"/v1/nodes/{peer_of(client, node)}/{verb}", body)
    if as_json:
        show(found, as_json, None)
    else:
        print(f"{text.printable(found['name'])} {found['peer']} is {found['state']}")


for _verb, _change_of in CHANGES.items():
    _add(_verb, _change_of)
