"""What training changes: the model and its optimiser, in this process or this process's shard of them.

The first process and its helpers do the same here: whatever takes all of them is one method, called in each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .policy import enable_checkpointing
from .shares import Alone
from .step import Learner, TrainingStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from .batch import BatchArrays
    from .config import AdapterSettings, TrainSettings
    from .loss import Objective
    from .measures import UpdateResult
    from .ranks import Ranks


class TrainingState:
    """`model` is whole, or a shard (`sharded.sharded_model`) when there are `ranks`; so is `reference`, if any."""

    def __init__(
        self,
        model: PreTrainedModel,
        reference: PreTrainedModel | None,
        objective: Objective,
        settings: TrainSettings,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._ranks = ranks
        self._learner = Learner(
            model,
            self.optimizer,
            reference,
            objective,
            settings,
            crew=ranks or Alone(),
            logprobs=None if ranks is None else _sharded().sharded_logprobs,
        )

    @classmethod
    def spread(
        cls,
        config: Mapping[str, Any],
        objective: Objective,
        settings: TrainSettings,
        ranks: Ranks,
        *,
        reference: bool,
        adapter: tuple[AdapterSettings, int] | None = None,
        source: PreTrainedModel | None = None,
    ) -> TrainingState:
        """A shard in each process, of the first one's `source`; all must call it. `adapter`: its settings and seed."""
        frozen = None
        if reference:  # before `source` gets an adapter
            frozen = _sharded().sharded_model(config, ranks, dtype=settings.dtype, source=source)
            frozen.requires_grad_(False)
        model = _sharded().sharded_model(config, ranks, dtype=settings.dtype, source=source, adapter=adapter)
        if settings.gradient_checkpointing:
            enable_checkpointing(model)
        return cls(model, frozen, objective, settings, ranks)

    def step(
        self, arrays: BatchArrays, minibatches: Sequence[NDArray[np.int64]], breathe: Callable[[], None]
    ) -> tuple[TrainingStep, list[UpdateResult]]:
        """One training step on a batch; all processes make it together."""
        step = TrainingStep(self._learner, arrays, breathe)
        return step, step.run(minibatches)

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Of the weights that are trained."""
        return {name: (parameter.shape, parameter.dtype) for name, parameter in self.parameters.items()}

    def state_shapes(self) -> dict[tuple[str, str], tuple[torch.Size, torch.dtype]]:
        """Of what the optimiser keeps: (parameter, its own word for it). Empty before the first update."""
        return {
            (name, key): (value.shape, value.dtype)
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def read(self, name: str, key: str = "") -> Tensor:
        """A parameter, or with a key what the optimiser keeps of it: whole, on the CPU. All processes must ask."""
        parameter = self.parameters[name]
        value: Tensor = self.optimizer.state[parameter][key] if key else parameter
        return (value if self._ranks is None else _sharded().whole(value)).detach().cpu()

    def write(self, name: str, key: str, value: Tensor | None) -> None:
        """Set what `read` gives. Of a tensor only the first process has the value; of a number all have it."""
        parameter = target = self.parameters[name]
        if key and value is not None and not value.ndim:
            self.optimizer.state[parameter][key] = value.clone()
            return
        if key:
            target = self.optimizer.state[parameter][key] = torch.zeros_like(parameter)
        if self._ranks is not None:
            _sharded().fill(target, value, self._ranks)
        else:
            assert value is not None
            with torch.no_grad():
                target.copy_(value)

    def forget(self) -> None:
        """The optimiser as it was before the first update."""
        self.optimizer.state.clear()


def _sharded() -> Any:
    """Loaded when needed: it takes a second more, which a learner of one process has no use for."""
    from . import sharded

    return sharded
