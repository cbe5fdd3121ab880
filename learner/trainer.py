"""The real trainer: GRPO on torch, in a worker thread, so that fetching and serving go on while it computes.

A step (DESIGN section 10): pi_learner,old once for the whole batch, then `minibatches` optimiser updates, each on whole
groups. Rows are padded once; what is evaluated at once is a slice of them, bounded by `micro_tokens`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
import trio
from transformers import LlamaForCausalLM

from echo2.p2p.errors import ConfigurationError

from .batch import BatchArrays, collate, split_groups
from .checkpoint import Checkpoints, load_optimizer, load_weights
from .config import CHECKPOINTS_FOLDER, EXPORTS_FOLDER
from .gguf_export import export_gguf, load_vocabulary
from .interfaces import TrainStats
from .loss import Objective, grpo_loss, importance_weights, kl_estimate
from .policy import load_policy, token_logprobs, token_logprobs_and_entropy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from .config import LearnerConfig
    from .interfaces import Batch, Progress

RNG_KEY = "generator"
"""Beside the optimiser's tensors, whose names all contain a slash."""


@dataclass(slots=True)
class _Tensors:
    """The batch in torch, and what is evaluated once at the start of the step. [B] or [B, T]."""

    tokens: Tensor
    mask: Tensor
    temperature: Tensor
    advantages: Tensor
    widths: NDArray[np.int64]
    old: Tensor
    weights: Tensor
    reference: Tensor | None


@dataclass(frozen=True, slots=True)
class _Update:
    loss: float
    clipped: int
    tokens: int
    gradient_norm: float
    fault: str | None


class TorchTrainer:
    """Implements `interfaces.Trainer` on the model of `config.model_dir`. Raises ConfigurationError when it is none."""

    def __init__(self, config: LearnerConfig) -> None:
        torch.set_num_threads(config.threads)
        transformers.utils.logging.disable_progress_bar()  # a daemon's stderr is log lines and nothing else
        self._config = config
        self._model, self.card = load_policy(config.model_dir)
        self._vocabulary = load_vocabulary(config.model_dir)
        self._reference = copy.deepcopy(self._model).requires_grad_(False) if config.kl_weight else None
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._generator = torch.Generator().manual_seed(config.seed)
        self._objective = Objective(*config.clip, ratio_cap=config.ratio_cap, kl_weight=config.kl_weight)
        self._checkpoints = Checkpoints(config.home / CHECKPOINTS_FOLDER, kept=config.checkpoints_kept)

    @property
    def model(self) -> LlamaForCausalLM:
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
        arrays = collate(batch, divide_by_std=self._config.divide_by_std)
        tensors, entropy = self._prepare(arrays, breathe)
        order = torch.randperm(len(batch.groups), generator=self._generator).numpy()
        updates = [
            self._update(tensors, rows, breathe) for rows in split_groups(arrays, self._config.minibatches, order)
        ]
        done = [update for update in updates if update.fault is None]
        sampled = tensors.mask
        kl = kl_estimate(tensors.old[sampled], torch.from_numpy(arrays.sampler_logprobs)[sampled])
        return TrainStats(
            loss=_mean([update.loss for update in done]),
            ratio_mean=_finite(tensors.weights[sampled].mean()),
            clip_share=sum(update.clipped for update in done) / max(1, sum(update.tokens for update in done)),
            kl_sampler_learner=_finite(kl.mean()),
            entropy=_finite(entropy[sampled].mean()),
            gradient_norm=_mean([update.gradient_norm for update in done]),
            groups_without_spread=arrays.groups_without_spread,
            updates=len(done),
            updates_skipped=tuple(update.fault for update in updates if update.fault is not None),
            kl_by_node=_by_node(arrays, kl),
        )

    def _prepare(self, arrays: BatchArrays, breathe: Callable[[], None]) -> tuple[_Tensors, Tensor]:
        """Everything that is evaluated once: pi_learner,old, the importance weights, the reference; and the entropy."""
        tensors = _Tensors(
            tokens=torch.from_numpy(arrays.tokens),
            mask=torch.from_numpy(arrays.mask),
            temperature=torch.from_numpy(arrays.temperature),
            advantages=torch.from_numpy(arrays.advantages),
            widths=arrays.tokens.shape[1] - np.argmax(arrays.mask[:, ::-1], axis=1),
            old=torch.zeros(arrays.tokens.shape),
            weights=torch.zeros(arrays.tokens.shape),
            reference=torch.zeros(arrays.tokens.shape) if self._reference is not None else None,
        )
        entropy = torch.zeros(arrays.tokens.shape)
        with torch.no_grad():
            for rows, width in self._slices(tensors, np.arange(len(arrays.tokens))):
                breathe()
                inputs = tensors.tokens[rows, :width], tensors.mask[rows, :width], tensors.temperature[rows]
                tensors.old[rows, :width], entropy[rows, :width] = token_logprobs_and_entropy(self._model, *inputs)
                if tensors.reference is not None and self._reference is not None:
                    tensors.reference[rows, :width] = token_logprobs(self._reference, *inputs)
            sampler = torch.from_numpy(arrays.sampler_logprobs)
            tensors.weights = importance_weights(tensors.old, sampler, self._objective.ratio_cap) * tensors.mask
        return tensors, entropy

    def _update(self, tensors: _Tensors, rows: NDArray[np.int64], breathe: Callable[[], None]) -> _Update:
        """One optimiser update on these rows; left out, with its reason, when a number is not finite."""
        tokens = int(tensors.mask[rows].sum())
        loss, clipped = 0.0, 0
        self._optimizer.zero_grad(set_to_none=True)
        for part, width in self._slices(tensors, rows):
            breathe()
            mask = tensors.mask[part, :width]
            logprobs = token_logprobs(self._model, tensors.tokens[part, :width], mask, tensors.temperature[part])
            reference = tensors.reference[part, :width][mask] if tensors.reference is not None else None
            parts = grpo_loss(
                logprobs[mask],
                tensors.old[part, :width][mask],
                tensors.weights[part, :width][mask],
                tensors.advantages[part, None].expand(mask.shape)[mask],
                self._objective,
                reference,
            )
            mean = parts.loss_sum / tokens
            loss += float(mean.detach())
            clipped += parts.clipped
            if not math.isfinite(loss):
                return _Update(0.0, 0, 0, 0.0, "the loss is not finite")
            mean.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.gradient_clip))
        if not math.isfinite(norm):
            return _Update(0.0, 0, 0, 0.0, "the gradient is not finite")
        self._optimizer.step()
        return _Update(loss, clipped, tokens, norm, None)

    def _slices(self, tensors: _Tensors, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int]]:
        """The rows in parts of at most `micro_tokens` padded tokens, shortest first, each with its longest's width."""
        rows = rows[np.argsort(tensors.widths[rows], kind="stable")]
        first = 0
        for stop in range(1, len(rows) + 1):
            if stop == len(rows) or (stop + 1 - first) * tensors.widths[rows[stop]] > self._config.micro_tokens:
                yield rows[first:stop], int(tensors.widths[rows[stop - 1]])
                first = stop

    # keeping and publishing

    def _save(self, progress: Progress) -> None:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        state: dict[str, Tensor] = {RNG_KEY: self._generator.get_state()}
        for parameter, values in self._optimizer.state.items():
            state.update({f"{names[parameter]}/{key}": value for key, value in values.items()})
        weights = {name: parameter.detach() for parameter, name in names.items()}
        self._checkpoints.save(progress, weights, state)

    def _restore(self) -> Progress | None:
        found = self._checkpoints.restore()
        if found is None:
            return None
        progress, folder = found
        _load_into(self._model, load_weights(folder))
        tensors = load_optimizer(folder)
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
        with torch.device(
            "meta"
        ):  # a second model without memory of its own, until the checkpoint's tensors are put in
            model = LlamaForCausalLM(copy.deepcopy(self._model.config))
        _load_into(model, load_weights(self._checkpoints.path(epoch, version)), assign=True)
        path = folder / f"e{epoch}-v{version}.gguf"
        return export_gguf(model, self._vocabulary, path, self._config.domain)


def _load_into(model: LlamaForCausalLM, weights: dict[str, Tensor], *, assign: bool = False) -> None:
    """Put weights into a model, all of them (tied ones are saved once).

    Raises ConfigurationError when they are another model's.
    """
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    if {name: weight.shape for name, weight in weights.items()} != expected:
        raise ConfigurationError(
            "the checkpoint is not of the model in model_dir; set model_dir to the folder the run began with"
        )
    missing: Any = model.load_state_dict(weights, strict=False, assign=assign)
    if assign:
        model.tie_weights()
    assert not missing.unexpected_keys


def _by_node(arrays: BatchArrays, kl: Tensor) -> dict[str, float]:
    """Mean k3-KL of the sampler to the learner over each node's tokens."""
    names, node = np.unique(np.asarray(arrays.nodes), return_inverse=True)
    of_token = np.broadcast_to(node[:, None], arrays.mask.shape)[arrays.mask]
    sums = np.bincount(of_token, weights=kl.numpy(), minlength=len(names))
    counts = np.bincount(of_token, minlength=len(names))
    return {str(name): float(total / count) for name, total, count in zip(names, sums, counts, strict=True)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _finite(value: Tensor) -> float:
    """A number fit to be shown and sent: 0 stands for one that is not finite (the update's fault names it)."""
    return float(value) if bool(torch.isfinite(value)) else 0.0
