"""The real trainer: GRPO on torch, in a worker thread, so that fetching and serving go on while it computes.

The step itself is `step`; here are the model, the optimiser, what is kept of them and what is published.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import transformers
import trio

from echo2.p2p.errors import ConfigurationError

from .batch import collate, split_groups
from .checkpoint import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoints, Tensors, load_tensors
from .config import CHECKPOINTS_FOLDER, EXPORTS_FOLDER
from .gguf_export import export_weights
from .loss import objective_of
from .measures import step_stats
from .policy import enable_checkpointing, load_policy
from .step import Learner, TrainingStep
from .vocabulary import load_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from .config import LearnerConfig
    from .interfaces import Batch, Progress, TrainStats

RNG_KEY = "generator"
"""Beside the optimiser's tensors, whose names all contain a slash."""


class TorchTrainer:
    """Implements `interfaces.Trainer` on the model of `config.model_dir`. Raises ConfigurationError when it is none."""

    def __init__(self, config: LearnerConfig) -> None:
        torch.set_num_threads(config.threads)
        transformers.utils.logging.disable_progress_bar()  # a daemon's stderr is log lines and nothing else
        self._config = config
        self._model, self.card = load_policy(config.model_dir)
        _check_products(config.train.dtype)
        if config.train.gradient_checkpointing:
            enable_checkpointing(self._model)
        self._vocabulary = load_vocabulary(config.model_dir)
        self._reference = (
            copy.deepcopy(self._model).requires_grad_(False) if config.objective.reference == "base" else None
        )
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.train.learning_rate,
            betas=config.train.betas,
            weight_decay=config.train.weight_decay,
            fused=True,
        )
        self._generator = torch.Generator().manual_seed(config.seed)
        self._objective = objective_of(config.objective)
        self._checkpoints = Checkpoints(config.home / CHECKPOINTS_FOLDER, kept=config.checkpoints_kept)

    @property
    def model(self) -> PreTrainedModel:
        """The live weights."""
        return self._model

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

    async def export(self, epoch: int, version: int) -> Path:
        """See `Trainer`. Reads the checkpoint, so it may overlap with `train`. Raises OSError when it is gone."""
        return await trio.to_thread.run_sync(self._export, epoch, version)

    # one training step

    def train_now(self, batch: Batch, breathe: Callable[[], None] = lambda: None) -> TrainStats:
        """One training step, in the calling thread. `breathe`, called between evaluations, may end it by raising."""
        torch.set_num_threads(self._config.threads)  # per thread: a new one starts with the machine's number
        arrays = collate(
            batch, grouping=self._config.objective.grouping, divide_by_std=self._config.objective.normalise_std
        )
        order = torch.randperm(len(batch.groups), generator=self._generator).numpy()
        minibatches = split_groups(arrays, self._config.objective.updates_per_step, order)
        learner = Learner(self._model, self._optimizer, self._reference, self._objective, self._config.train)
        step = TrainingStep(learner, arrays, breathe)
        with _products_in(self._config.train.dtype):
            updates = step.run(minibatches)
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
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        state: dict[str, Tensor] = {RNG_KEY: self._generator.get_state()}
        for parameter, values in self._optimizer.state.items():
            state.update({f"{names[parameter]}/{key}": value for key, value in values.items()})
        weights = {name: parameter.detach() for parameter, name in names.items()}
        self._checkpoints.save(progress, Tensors.of(weights), Tensors.of(state))

    def _restore(self) -> Progress | None:
        found = self._checkpoints.restore()
        if found is None:
            return None
        progress, folder = found
        _load_into(self._model, load_tensors(folder, WEIGHTS_FILE))
        tensors = load_tensors(folder, OPTIMIZER_FILE)
        self._generator.set_state(tensors.pop(RNG_KEY))
        parameters = dict(self._model.named_parameters())
        self._optimizer.state.clear()
        for name, value in tensors.items():
            parameter, _, key = name.rpartition("/")
            self._optimizer.state[parameters[parameter]][key] = value
        return progress

    def _export(self, epoch: int, version: int) -> Path:
        folder = self._config.home / EXPORTS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():  # one export at a time: whatever lies here was never adopted
            leftover.unlink()
        weights = load_tensors(self._checkpoints.path(epoch, version), WEIGHTS_FILE)
        _check_weights(self._model, weights)
        path = folder / f"e{epoch}-v{version}.gguf"
        return export_weights(self._model.config, weights, self._vocabulary, path, self._config.domain)


def _load_into(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Put weights into a model, all of them (tied ones are saved once).

    Raises ConfigurationError when they are another model's.
    """
    _check_weights(model, weights)
    missing: Any = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys


def _check_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    if {name: weight.shape for name, weight in weights.items()} != expected:
        raise ConfigurationError(
            "the checkpoint is not of the model in model_dir; set model_dir to the folder the run began with"
        )


def _check_products(dtype: str) -> None:
    """Raises ConfigurationError when this processor would compute bf16 products more slowly than f32 ones."""
    if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ConfigurationError('train.dtype = "bf16": this processor has no bf16 instructions; set it to "f32"')


@contextmanager
def _products_in(dtype: str) -> Iterator[None]:
    """Matrix products in this format. Weights, sums, activations and the optimiser stay in float32 in any case.

    The setting is the whole process's, but nothing else in a learner multiplies matrices.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16" if dtype == "bf16" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
