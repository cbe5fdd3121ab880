"""`echo2 watch`: a run on the terminal, read over REST, until it is over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live

from .rest_client import NoAnswer
from .watch_screen import plain_line, render

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from .rest_client import Look, RestClient

ENDED = frozenset({"finished", "stopped"})

QUIET_LOOKS = 30
"""Without a terminal: a line for each change of step, state or reason, and one after so many looks without any."""


LINES_UNBOUNDED = 1000
"""In a file or a pipe every node has its line."""


def is_over(look: Look) -> bool:
    """Nothing more will change: the run has ended, and the last rollout has its state."""
    return look.run.state in ENDED and not look.run.waiting


def as_json(look: Look) -> str:
    """One line of JSON."""
    return json.dumps(
        {
            "run": look.run.model_dump(mode="json"),
            "pool": look.pool.model_dump(mode="json"),
            "nodes": [node.model_dump(mode="json") for node in look.nodes],
        }
    )


def watch(
    client: RestClient,
    run: str,
    *,
    once: bool,
    as_lines: bool,
    seconds: float,
    sleep: Callable[[float], None],
    out: TextIO,
) -> int:
    """Show until the run is over. Returns the exit code: 0, or 1 for a run that was stopped.

    Raises ConfigurationError, and NoAnswer when the first look fails; later ones are shown and tried again.
    """
    name = client.run_name(run)
    look = client.look(name)
    console = Console(file=out)
    if once:
        print(as_json(look), file=out, flush=True) if as_lines else console.print(_screen(look, console))
    elif as_lines or not console.is_terminal:
        look = _lines(client, name, look, as_lines=as_lines, seconds=seconds, sleep=sleep, out=out)
    else:
        look = _live(client, name, look, console, seconds=seconds, sleep=sleep)
    return 1 if look.run.state == "stopped" else 0


def _live(
    client: RestClient, name: str, look: Look, console: Console, *, seconds: float, sleep: Callable[[float], None]
) -> Look:
    with Live(console=console, auto_refresh=False, screen=True) as live:
        note = ""
        while not is_over(look) or note:
            live.update(_screen(look, console, note), refresh=True)
            sleep(seconds)
            look, note = _again(client, name, look)
    console.print(_screen(look, console))  # stays, when the alternate screen is gone
    return look


def _lines(
    client: RestClient,
    name: str,
    look: Look,
    *,
    as_lines: bool,
    seconds: float,
    sleep: Callable[[float], None],
    out: TextIO,
) -> Look:
    shown: tuple[object, ...] = ()
    quiet, note = 0, ""
    while True:
        news = (look.run.state, look.run.learner_version, look.run.version, note)
        quiet = 0 if news != shown else quiet + 1
        if as_lines:
            print(as_json(look), file=out, flush=True)
        elif quiet % QUIET_LOOKS == 0:
            print(note or plain_line(look), file=out, flush=True)
        shown = news
        if is_over(look) and not note:
            return look
        sleep(seconds)
        look, note = _again(client, name, look)


def _again(client: RestClient, name: str, look: Look) -> tuple[Look, str]:
    """The next look, or the last one and why there is no newer."""
    try:
        return client.look(name), ""
    except NoAnswer as error:
        return look, str(error)


def _screen(look: Look, console: Console, note: str = "") -> RenderableType:
    height = console.height if console.is_terminal else LINES_UNBOUNDED
    return render(look, width=console.width, height=height, note=note)
