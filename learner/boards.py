"""TensorBoard and Weights & Biases, where they are installed and asked for: `metrics_log.MetricsSink`s.

Both are started before the learner is: what is missing is said in one line then, not in the middle of a run.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import TYPE_CHECKING, Any

from echo2.p2p.errors import ConfigurationError

from .metrics_log import METRICS_FILE, MetricsFile, MetricsLog, MetricsSink, scalars

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from echo2.p2p.messages import StepMetrics

    from .config import LearnerConfig, WandbSettings

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"

RUN_ID_CHARACTERS = 16


class TensorBoard:
    """Event files in a folder, one for each start; steps that are undone are purged, as TensorBoard has it.

    Raises ConfigurationError when the package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        _need("tensorboard", "metrics.tensorboard = true")
        self._module: Any = importlib.import_module("torch.utils.tensorboard")
        self._folder = folder
        self._writer: Any = None

    def begin(self, version: int) -> None:
        """See `MetricsSink`."""
        self.close()
        self._writer = self._module.SummaryWriter(str(self._folder), purge_step=version)

    def step(self, metrics: StepMetrics, *, epoch: int, wall_seconds: float) -> None:  # noqa: ARG002 - the interface
        """See `MetricsSink`."""
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics.step, walltime=wall_seconds)
        self._writer.flush()

    def close(self) -> None:
        """See `MetricsSink`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """One run there for one run here: its id follows from the learner's key and the run's name, so that a restart goes
    on with it. Steps trained again after a crash are not shown again: there, a step's numbers are of its first time.

    `WANDB_MODE=offline` and everything else that the package reads from its environment is as it documents. Raises
    ConfigurationError when the package is not installed, or cannot begin.
    """

    def __init__(
        self, settings: WandbSettings, *, folder: Path, run: str, peer: str, facts: Mapping[str, object]
    ) -> None:
        _need("wandb", "[metrics] wandb")
        wandb: Any = importlib.import_module("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        chosen = {"mode": settings.mode} if settings.mode else {}
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=run,
                id=hashlib.sha256(f"{peer}\0{run}".encode()).hexdigest()[:RUN_ID_CHARACTERS],
                resume="allow",
                dir=str(folder),
                config=dict(facts),
                **chosen,
            )
        except Exception as error:
            words = " ".join(str(error).split())
            raise ConfigurationError(
                f"Weights & Biases does not begin: {words}; log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def begin(self, version: int) -> None:
        """See `MetricsSink`."""

    def step(self, metrics: StepMetrics, *, epoch: int, wall_seconds: float) -> None:
        """See `MetricsSink`."""
        self._run.log({**scalars(metrics), "epoch": epoch, "wall_seconds": wall_seconds}, step=metrics.step)

    def close(self) -> None:
        """See `MetricsSink`."""
        self._run.finish()


def open_metrics(config: LearnerConfig, *, peer: str) -> MetricsLog:
    """What the settings ask for. Raises ConfigurationError."""
    boards: list[MetricsSink] = []
    if config.metrics.tensorboard:
        boards.append(TensorBoard(config.home / TENSORBOARD_FOLDER))
    if config.metrics.wandb is not None:
        facts = config.model_dump(mode="json", include={"objective", "train", "adapter", "seed", "domain"})
        boards.append(
            WeightsAndBiases(
                config.metrics.wandb, folder=config.home / WANDB_FOLDER, run=config.run_name, peer=peer, facts=facts
            )
        )
    return MetricsLog(MetricsFile(config.home / METRICS_FILE), boards)


def _need(package: str, setting: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"{setting} needs the package {package}, which is not installed: pip install {package}, or take the "
            "setting away"
        ) from error
