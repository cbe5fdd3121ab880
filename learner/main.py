"""The `echo2-learner` command: make a model folder, make a key, run a learner."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import trio
import typer

from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.channel import hold_against
from echo2.p2p.daemon import (
    STATUS_FILE,
    configure_logging,
    lock_state_dir,
    run_cli,
    run_daemon,
    stoppable,
    write_status,
)
from echo2.p2p.disk_store import DiskStore
from echo2.p2p.errors import ConfigurationError, ProtocolError
from echo2.p2p.identity import load_or_create_identity
from echo2.p2p.settings import refuse_used

from .boards import open_metrics
from .config import IDENTITY_FILE, MODEL_DIR_FILE, SNAPSHOTS_FOLDER, LearnerConfig, load_config
from .home import base_model
from .launch import PROCESSES_MAX, follow_first, place_in
from .prepare import MODEL_NAMES, USED, prepare, prepare_from, tell_loading
from .service import LearnerService
from .team import open_team

if TYPE_CHECKING:
    from echo2.p2p.identity import Identity

    from .launch import Place
    from .metrics_log import MetricsLog
    from .trainer import TorchTrainer

LOG_LEVELS = ("debug", "info", "warning", "error")

log = logging.getLogger(__name__)

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def learner() -> None:
    """Train a model on rollouts from a pool, and publish its snapshots to it."""


@app.command("prepare")
def prepare_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="a new or empty folder")],
    model: Annotated[str | None, typer.Option(help=f"{' or '.join(MODEL_NAMES)}, which come with the package")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="a Hugging Face folder (llama, qwen2 or qwen3)")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="what to call the model; with --from, else the folder's name")
    ] = None,
) -> None:
    """Make the model folder a run starts from; coordinator and learner both read it."""
    if (model is None) == (source is None):
        raise ConfigurationError(
            f"name either --model ({' or '.join(MODEL_NAMES)}) or --from with a Hugging Face folder"
        )
    if source is not None:
        card = prepare_from(source, out, name)
    else:
        known = next((known for known in MODEL_NAMES if known == model), None)
        if known is None:
            raise ConfigurationError(f"--model {model} is not known; choose {' or '.join(MODEL_NAMES)}")
        card = prepare(known, out)
    print(f"{out}: {card.name}, {card.vocabulary_size} symbols, {card.context_tokens} tokens of context")


@app.command()
def identity(home: Annotated[Path, typer.Option(metavar="DIR", help="the learner's folder")]) -> None:
    """Print the learner's peer id, making its key on first use; the coordinator's run names it as `learner`."""
    print(load_or_create_identity(home / IDENTITY_FILE).peer_id)


@app.command()
def check(config: Annotated[Path, typer.Option(help="the settings file")] = Path("learner.toml")) -> None:
    """Print every setting with its value, as JSON, or say what is wrong with the file; nothing is started.

    Of a join string as `coordinator` the token is left out: it lets others in, and such output is shown around.
    """
    settings = load_config(config)
    shown = settings.model_copy(update={"coordinator": "".join(settings.coordinator.split()).partition("?")[0]})
    print(shown.model_dump_json())


@app.command("export-hf")
def export_command(
    home: Annotated[Path, typer.Argument(metavar="HOME", help="the learner's folder")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="a new or empty folder")],
    dtype: Annotated[str, typer.Option(help="number format of the weights: f32, bf16 or f16")] = "f32",
    model_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="the model the run began with, if it has been moved")
    ] = None,
) -> None:
    """Make a Hugging Face folder of the newest checkpoint; an adapter is folded into its base."""
    if dtype not in ("f32", "bf16", "f16"):
        raise ConfigurationError(f"--dtype {dtype} is not one of f32, bf16, f16")
    base_model(home, model_dir)
    refuse_used(out.absolute(), USED)
    tell_loading()
    from .export_home import export_home  # takes seconds to load

    progress = export_home(home, out, model_dir=model_dir, dtype=dtype)
    print(f"{out}: version {progress.version} of the run {progress.run}, {dtype}")


@app.command()
def run(
    config: Annotated[Path, typer.Option(help="the settings file")] = Path("learner.toml"),
    processes: Annotated[
        int, typer.Option(min=1, max=PROCESSES_MAX, help="processes the model is spread over; with GPUs, one each")
    ] = 1,
    log_level: Annotated[str, typer.Option(help=", ".join(LOG_LEVELS))] = "info",
    log_format: Annotated[str, typer.Option(help="json or text; unset: text on a terminal, else json")] = "",
) -> None:
    """Train, publish and serve snapshots until stopped (SIGTERM or Ctrl-C); started again, it goes on where it was.

    On several machines, torchrun starts it in place of --processes: torchrun ... -m echo2.learner run --config ...
    """
    if log_level not in LOG_LEVELS:
        raise ConfigurationError(f"--log-level {log_level} is not one of {', '.join(LOG_LEVELS)}")
    settings = load_config(config)
    place = place_in(os.environ)
    if place is not None and place.rank > 0:
        configure_logging(f"echo2-learner {place.rank}", log_level, log_format)
        _help(place, settings)
        return
    configure_logging("echo2-learner", log_level, log_format)
    with stoppable(), lock_state_dir(settings.home):
        key = load_or_create_identity(settings.identity_path)
        (settings.home / MODEL_DIR_FILE).write_text(f"{settings.model_dir.resolve()}\n", encoding="utf-8")
        with (
            open_team(
                place,
                processes,
                home=settings.home,
                arguments=sys.argv[1:],
                seconds=settings.train.process_seconds,
            ) as team,
            closing(open_metrics(settings, peer=key.peer_id)) as metrics,
        ):
            from .trainer import TorchTrainer  # here: a mistake in the settings is told before the seconds torch takes

            run_daemon(partial(_serve, settings, key, TorchTrainer(settings, team), metrics))


def _help(place: Place, config: LearnerConfig) -> None:
    """The part of a process that is not the first: to compute what that one orders."""
    follow_first(place)
    from .helper import serve

    serve(place, seconds=config.train.process_seconds, threads=config.threads)


async def _serve(config: LearnerConfig, key: Identity, trainer: TorchTrainer, metrics: MetricsLog) -> None:
    from echo2.p2p.libp2p_transport import open_libp2p_transport  # takes seconds to load

    coordinator = config.coordinator_address
    store = DiskStore(config.home / SNAPSHOTS_FOLDER)
    async with open_libp2p_transport(key, config.listen, announce=config.announce, state_dir=config.home) as transport:

        def complain(peer: str, error: ProtocolError) -> None:
            log.warning("%s broke the protocol: %s", peer, error)
            hold_against(transport, peer, error)

        broadcaster = Broadcaster(transport, store, coordinator.peer, clock=trio.current_time, complain=complain)
        service = LearnerService(
            config=config,
            identity=key,
            transport=transport,
            coordinator=coordinator,
            run=config.run_name,
            trainer=trainer,
            store=store,
            broadcaster=broadcaster,
            clock=trio.current_time,
            wall=time.time,
            card=trainer.card,
            show=partial(write_status, config.home / STATUS_FILE),
            metrics=metrics,
            network=transport.view,
        )
        transport.tell_apart(lambda peer: peer == coordinator.peer or broadcaster.is_holder(peer))
        await service.run()


def main() -> None:
    """Entry point of the `echo2-learner` command."""
    run_cli(app)


if __name__ == "__main__":
    main()
