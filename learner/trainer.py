"""The real trainer: GRPO on torch, in a worker thread, so that fetching and serving go on while it computes.

The step itself is `step`, model and optimiser are in `training_state`; here is what is kept of them and published. With
several processes (`team`) this is the first one: what takes all of them is a turn, and the others do the same.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import transformers
import trio

from echo2.p2p.errors import ConfigurationError

from .adapter import MergedWeights, add_adapter, base_of, export_adapter, frozen_copy
from .architectures import parameter_shapes
from .batch import collate, split_groups
from .checkpoint import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoints, Tensors, load_tensors, open_tensors
from .config import CHECKPOINTS_FOLDER, EXPORTS_FOLDER
from .gguf_export import export_weights
from .launch import first_place
from .loss import objective_of
from .measures import step_stats
from .orders import FORGET, READ, SPREAD, STEP, WRITE, pack_step
from .policy import enable_checkpointing, load_policy
from .products import check_products, products_in
from .team import Team
from .training_state import TrainingState
from .vocabulary import load_vocabulary
from .weights_file import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from .config import LearnerConfig
    from .interfaces import Batch, Progress, TrainStats
    from .ranks import Ranks

RNG_KEY = "generator"
"""Beside the optimiser's tensors, whose names all contain a slash."""


class TorchTrainer:
    """Implements `interfaces.Trainer` on the model of `config.model_dir`. Raises ConfigurationError when it is none."""

    def __init__(self, config: LearnerConfig, team: Team | None = None) -> None:
        torch.set_num_threads(config.threads)
        transformers.utils.logging.disable_progress_bar()  # a daemon's stderr is log lines and nothing else
        self._config = config
        self._team = team or Team(seconds=config.train.process_seconds)
        model, self.card = load_policy(config.model_dir)
        self._model_config = model.config
        self._vocabulary = load_vocabulary(config.model_dir)
        self._generator = torch.Generator().manual_seed(config.seed)
        self._objective = objective_of(config.objective)
        self._checkpoints = Checkpoints(config.home / CHECKPOINTS_FOLDER, kept=config.checkpoints_kept)
        if self._team.ranks is None and torch.cuda.is_available():
            self._team.join(first_place(1, config.home))  # one GPU is used as several are
        self._base = base_of(config.model_dir, None if config.adapter is None else config.adapter.alpha)
        if self._team.ranks is None:
            check_products(config.train.dtype)
            self._state = self._alone(model)
        else:
            self._state = self._spread(model, self._team.ranks)

    def _alone(self, model: PreTrainedModel) -> TrainingState:
        if self._config.train.gradient_checkpointing:
            enable_checkpointing(model)
        adapter, reference = self._config.adapter, None
        if self._config.objective.reference == "base":
            reference = frozen_copy(model, shared=adapter is not None)
        if adapter is not None:
            add_adapter(model, adapter, seed=self._config.seed)
        return TrainingState(model, reference, self._objective, self._config.train)

    def _spread(self, model: PreTrainedModel, ranks: Ranks) -> TrainingState:
        if ranks.device.type == "cpu":
            check_products(self._config.train.dtype)
        config = json.loads(model.config.to_json_string(use_diff=False))
        reference = self._config.objective.reference == "base"
        adapter = self._config.adapter
        words = {
            "model": config,
            "objective": self._config.objective.model_dump_json(),
            "train": self._config.train.model_dump_json(),
            "reference": reference,
            "adapter": None if adapter is None else adapter.model_dump_json(),
            "seed": self._config.seed,
        }
        with self._team.turn(SPREAD, words):
            return TrainingState.spread(
                config,
                self._objective,
                self._config.train,
                ranks,
                reference=reference,
                adapter=None if adapter is None else (adapter, self._config.seed),
                source=model,
            )

    @property
    def model(self) -> PreTrainedModel:
        """The live weights."""
        return self._state.model

    async def train(self, batch: Batch) -> TrainStats:
        """See `Trainer`. Cancelled, it ends with the rows it is at: the process is ending, the checkpoint is the truth.

        Never abandoned: a thread still inside torch when the interpreter ends takes the process down with an abort.
        """
        return await trio.to_thread.run_sync(self.train_now, batch, trio.from_thread.check_cancelled)

    async def save(self, progress: Progress) -> None:
        """See `Trainer`."""
        await trio.to_thread.run_sync(self._save, progress)

    async def restore(self) -> Progress | None:
        """See `Trainer`."""
        return await trio.to_thread.run_sync(self._restore)

    async def export(self, epoch: int, version: int, *, adapter: bool = False) -> Path:
        """See `Trainer`. Reads the checkpoint, so it may overlap with `train`. Raises OSError when it is gone."""
        return await trio.to_thread.run_sync(self._export, epoch, version, adapter)

    # one training step

    def train_now(self, batch: Batch, breathe: Callable[[], None] = lambda: None) -> TrainStats:
        """One training step, in the calling thread. `breathe`, called between evaluations, may end it by raising."""
        torch.set_num_threads(self._config.threads)  # per thread: a new one starts with the machine's number
        arrays = collate(
            batch, grouping=self._config.objective.grouping, divide_by_std=self._config.objective.normalise_std
        )
        order = torch.randperm(len(batch.groups), generator=self._generator).numpy()
        minibatches = split_groups(arrays, self._config.objective.updates_per_step, order)

        def breathe_on() -> None:
            self._team.progress()
            breathe()

        dtype = self._config.train.dtype
        with products_in(dtype), self._team.turn(STEP, {"dtype": dtype}, pack_step(arrays, minibatches)):
            step, updates = self._state.step(arrays, minibatches, breathe_on)
        return step_stats(
            arrays,
            old=step.old.numpy(),
            entropy=step.entropy.numpy(),
            reference=None if step.reference is None else step.reference.numpy(),
            ratio_cap=self._objective.ratio_cap,
            updates=updates,
        )

    # keeping and publishing

    def _save(self, progress: Progress) -> None:
        kept = {f"{name}/{key}": (name, key) for name, key in self._state.state_shapes()}
        beside = {RNG_KEY: self._generator.get_state()} | self._base.state()

        def load(entry: str) -> Tensor:
            return beside[entry] if entry in beside else self._read(*kept[entry])

        shapes = {f"{name}/{key}": shape for (name, key), shape in self._state.state_shapes().items()}
        optimizer = Tensors(shapes | dict(Tensors.of(beside).shapes), load)
        self._checkpoints.save(progress, Tensors(self._state.shapes(), self._read), optimizer)

    def _restore(self) -> Progress | None:
        found = self._checkpoints.restore()
        if found is None:
            return None
        progress, folder = found
        with open_tensors(folder, WEIGHTS_FILE) as weights:
            self._check_weights(weights.shapes)
            with open_tensors(folder, OPTIMIZER_FILE) as state:
                beside = {entry: state.load(entry) for entry in state.shapes if "/" not in entry}
            self._base.check(beside, self._config.model_dir)
            for name in weights.shapes:
                self._write(name, "", weights.load(name))
        with self._team.turn(FORGET):
            self._state.forget()
        with open_tensors(folder, OPTIMIZER_FILE) as state:
            for entry in state.shapes:
                name, _, key = entry.rpartition("/")
                if name:
                    self._write(name, key, state.load(entry))
            self._generator.set_state(state.load(RNG_KEY).clone())
        return progress

    def _read(self, name: str, key: str = "") -> Tensor:
        with self._team.turn(READ, {"name": name, "key": key}):
            return self._state.read(name, key)

    def _write(self, name: str, key: str, value: Tensor) -> None:
        scalar = float(value) if key and not value.ndim else None
        with self._team.turn(WRITE, {"name": name, "key": key, "scalar": scalar}):
            self._state.write(name, key, value)

    def _export(self, epoch: int, version: int, adapter: bool) -> Path:
        folder = self._config.home / EXPORTS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():  # one export at a time: whatever lies here was never adopted
            leftover.unlink()
        weights = load_tensors(self._checkpoints.path(epoch, version), WEIGHTS_FILE)
        self._check_weights({name: tuple(weight.shape) for name, weight in weights.items()})
        path, config, domain = folder / f"e{epoch}-v{version}.gguf", self._model_config, self._config.domain
        if self._base.alpha is None:
            return export_weights(config, weights, self._vocabulary, path, domain)
        if adapter:
            return export_adapter(config, weights, self._base.alpha, path, domain)
        with Weights(self._config.model_dir) as base:
            merged = MergedWeights(base, parameter_shapes(config), weights, self._base.alpha)
            return export_weights(config, merged, self._vocabulary, path, domain)

    def _check_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if dict(shapes) != {name: tuple(shape) for name, (shape, _) in self._state.shapes().items()}:
            raise ConfigurationError(
                "the checkpoint is not of the model in model_dir, or of another adapter; set model_dir to the folder "
                "and [adapter] to what the run began with"
            )
