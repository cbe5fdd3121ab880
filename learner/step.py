"""One training step on packed micro-batches: pi_learner,old, then an optimiser update a minibatch. Torch, no I/O.

pi_learner,old are the weights at the start of the step (DESIGN section 10). So the minibatches of later updates are
evaluated before the first update, without gradient; the first minibatch is not evaluated twice: the forward pass of its
own update gives pi_learner,old, and its ratio is exactly 1. Rollouts whose advantage is 0 have no gradient when there
is no KL term: they are measured, and never sent through a backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from .culprits import find_culprits
from .loss import grpo_loss, importance_weights, token_scales
from .measures import UpdateResult
from .packing import packs
from .policy import packed_logprobs
from .shares import Alone, rounds_of, split_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from .batch import BatchArrays
    from .config import TrainSettings
    from .loss import LossParts, Objective
    from .packing import Pack
    from .shares import Crew, Round


@dataclass(frozen=True, slots=True)
class Learner:
    """What a step works with; `reference` is the frozen base model when the objective has a KL term.

    `logprobs` evaluates a pack of a model that is spread over the crew; None: `policy.packed_logprobs` does.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    reference: PreTrainedModel | None
    objective: Objective
    settings: TrainSettings
    crew: Crew = field(default_factory=Alone)
    logprobs: Callable[..., tuple[Tensor, Tensor]] | None = None


class TrainingStep:
    """The step on one batch. `breathe`, called between evaluations, may end it by raising.

    `old`, `entropy` and `reference` are float32 [B, T], 0 where nothing was sampled; complete after `run`.
    """

    def __init__(self, learner: Learner, arrays: BatchArrays, breathe: Callable[[], None]) -> None:
        self._learner = learner
        self._arrays = arrays
        self._breathe = breathe
        self._tokens = torch.from_numpy(arrays.tokens)
        self._sampler = torch.from_numpy(arrays.sampler_logprobs)
        self._advantages = torch.from_numpy(arrays.advantages)
        self._temperature = torch.from_numpy(arrays.temperature)
        self._parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
        self.old = torch.zeros(arrays.tokens.shape)
        self.entropy = torch.zeros(arrays.tokens.shape)
        self.reference = torch.zeros(arrays.tokens.shape) if learner.reference is not None else None

    def run(self, minibatches: Sequence[NDArray[np.int64]]) -> list[UpdateResult]:
        """One update for each minibatch (row numbers), in their order; every row belongs to one."""
        for rows in minibatches[1:]:
            self._measure(rows)
        return [self._update(rows, measured=index > 0) for index, rows in enumerate(minibatches)]

    def _update(self, rows: NDArray[np.int64], *, measured: bool) -> UpdateResult:
        """One optimiser update on these rows; left out, with reason and culprits, when a number is out of bounds."""
        lengths = torch.from_numpy(self._arrays.mask[rows].sum(axis=1))
        scales = torch.zeros(len(self._tokens))
        scales[rows] = token_scales(lengths, self._learner.objective)
        taught = self._teaches(rows)
        if not measured:
            self._measure(rows[~taught])
        crew = self._learner.crew
        loss, low, high = 0.0, 0, 0
        self._learner.optimizer.zero_grad(set_to_none=True)
        todo = iter(self._rounds(rows[taught]))
        for turn in todo:
            pack, counts = turn.of(crew.rank)
            self._breathe()
            logprobs, entropy = self._logprobs(self._learner.model, pack, entropy=not measured)
            if not measured:
                self._note(pack, logprobs.detach(), entropy, counts=counts)
            parts = self._loss(pack, logprobs, scales, measured=measured) if counts else None
            if parts is not None:
                loss += float(parts.loss_sum.detach())
            bad = parts is not None and (bool(parts.bad) or not math.isfinite(loss))
            if float(crew.sum(torch.tensor([float(bad)]))):
                self._measure_rounds(todo if not measured else ())  # the weights are still those of the start
                if not measured:
                    self._merge(rows[taught])
                return self._fault(turn, logprobs.detach())
            if parts is not None:
                low, high = low + int(parts.clipped_low), high + int(parts.clipped_high)
            loss_sum = logprobs.sum() * 0.0 if parts is None else parts.loss_sum
            loss_sum.backward()  # type: ignore[no-untyped-call]
        if not measured:
            self._merge(rows[taught])
        loss, low, high = crew.sum(torch.tensor([loss, low, high], dtype=torch.float64)).tolist()
        return self._apply(UpdateResult(loss, int(lengths.sum()), int(low), int(high)))

    def _loss(self, pack: Pack, logprobs: Tensor, scales: Tensor, *, measured: bool) -> LossParts:
        at = torch.from_numpy(pack.rows), torch.from_numpy(pack.columns)
        old = self.old[at] if measured else logprobs.detach()
        weights = importance_weights(old, self._sampler[at], self._learner.objective.ratio_cap)
        reference = None if self.reference is None else self.reference[at]
        return grpo_loss(
            logprobs, old, weights, self._advantages[at[0]], self._learner.objective, reference, scales[at[0]]
        )

    def _fault(self, turn: Round, logprobs: Tensor) -> UpdateResult:
        """What to say of a round with a bad number in it, whichever process met it; `logprobs` are this one's."""
        pack, counts = turn.of(self._learner.crew.rank)
        theta = torch.zeros(self.old.shape)
        if counts:
            theta[pack.rows, pack.columns] = logprobs
        rows = turn.rows
        theta[rows] = self._learner.crew.sum(theta[rows])
        at = rows[np.nonzero(self._arrays.mask[rows])[0]], np.nonzero(self._arrays.mask[rows])[1]
        old = self.old[at]
        weights = importance_weights(old, self._sampler[at], self._learner.objective.ratio_cap)
        culprits = find_culprits(
            rows=at[0],
            logprobs=theta[at].numpy(),
            old=old.numpy(),
            weights=weights.numpy(),
            advantages=self._arrays.advantages[at[0]],
            objective=self._learner.objective,
            reference=None if self.reference is None else self.reference[at].numpy(),
        )
        return UpdateResult(fault="a ratio has exploded or is not finite", culprits=culprits)

    def _apply(self, result: UpdateResult) -> UpdateResult:
        for parameter in self._parameters:
            if parameter.grad is None:  # no rollout taught anything: the optimiser's momentum still moves the weights
                parameter.grad = torch.zeros_like(parameter)
        total = torch.nn.utils.clip_grad_norm_(self._parameters, self._learner.settings.gradient_clip)
        # Of shards the norm is spread too, until it is asked for as a whole.
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        if not math.isfinite(norm):
            return UpdateResult(fault="the gradient is not finite")
        self._learner.optimizer.step()
        self._learner.optimizer.zero_grad(set_to_none=True)  # before the next forward pass needs the memory
        return UpdateResult(result.loss, result.tokens, result.clipped_low, result.clipped_high, norm)

    def _teaches(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows have a gradient: not those whose advantage is 0, unless the KL pulls at them too."""
        pulled = bool(self._learner.objective.kl_weight)
        return np.asarray(pulled | (self._arrays.advantages[rows] != 0))

    def _rounds(self, rows: NDArray[np.int64]) -> list[Round]:
        arrays = self._arrays
        shares = split_rows(arrays.mask, arrays.group, rows, self._learner.crew.size)
        tokens_max = self._learner.settings.micro_tokens
        return rounds_of(
            [packs(arrays.tokens, arrays.mask, arrays.group, share, tokens_max=tokens_max) for share in shares]
        )

    def _measure(self, rows: NDArray[np.int64]) -> None:
        """pi_learner,old, reference and entropy of these rows, without gradient; all processes then know them."""
        self._measure_rounds(self._rounds(rows))
        self._merge(rows)

    @torch.no_grad()
    def _measure_rounds(self, todo: Iterable[Round]) -> None:
        for turn in todo:
            self._breathe()
            pack, counts = turn.of(self._learner.crew.rank)
            self._note(pack, *self._logprobs(self._learner.model, pack, entropy=True), counts=counts)

    @torch.no_grad()
    def _note(self, pack: Pack, logprobs: Tensor, entropy: Tensor, *, counts: bool) -> None:
        learner = self._learner
        reference = None if learner.reference is None else self._logprobs(learner.reference, pack)[0]
        if not counts:
            return
        self.old[pack.rows, pack.columns] = logprobs
        self.entropy[pack.rows, pack.columns] = entropy
        if self.reference is not None and reference is not None:
            self.reference[pack.rows, pack.columns] = reference

    def _merge(self, rows: NDArray[np.int64]) -> None:
        """Each row was noted by one process: now by all. Once for a row, or it would be added to itself."""
        for noted in (self.old, self.entropy, self.reference):
            if noted is not None and self._learner.crew.size > 1 and len(rows):
                noted[rows] = self._learner.crew.sum(noted[rows])

    def _logprobs(self, model: PreTrainedModel, pack: Pack, *, entropy: bool = False) -> tuple[Tensor, Tensor]:
        evaluate = self._learner.logprobs or packed_logprobs
        return evaluate(
            model,
            pack,
            self._tokens[pack.rows, pack.columns],
            self._temperature[pack.rows],
            chunk=self._learner.settings.logprob_chunk_tokens,
            entropy=entropy,
        )
