"""A learner's process that is not the first: it holds a shard and does what the first one orders, until told to end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from .batch import BatchArrays
from .config import ObjectiveSettings, TrainSettings
from .loss import objective_of
from .products import products_in
from .ranks import END, NOTHING, Ranks
from .training_state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .launch import Place

SPREAD, STEP, READ, WRITE, FORGET = "spread", "step", "read", "write", "forget"
"""The orders of `trainer`. Each is one call of the same name on every process's `TrainingState`."""

MINIBATCH = "minibatch"

log = logging.getLogger(__name__)


def serve(place: Place, *, seconds: float, threads: int) -> None:
    """Take orders until the first process says it is the end. Raises RuntimeError when it is gone."""
    torch.set_num_threads(threads)
    ranks = Ranks(place, seconds=seconds)
    log.info("process %d of %d is ready on %s", place.rank, place.size, ranks.device)
    state: TrainingState | None = None
    while True:
        order, words, arrays = ranks.receive()
        if order == END:
            return
        if order == SPREAD:
            state = _spread(words, ranks)
        elif order != NOTHING:
            assert state is not None  # the first order of all is to spread the model
            _obey(state, order, words, arrays)


def step_order(arrays: BatchArrays, minibatches: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
    """What a helper needs of a batch: not who made its rollouts."""
    parts = {f"{MINIBATCH}{index}": rows for index, rows in enumerate(minibatches)}
    return parts | {
        "tokens": arrays.tokens,
        "mask": arrays.mask,
        "sampler_logprobs": arrays.sampler_logprobs,
        "advantages": arrays.advantages,
        "temperature": arrays.temperature,
        "group": arrays.group,
    }


def _spread(words: Mapping[str, Any], ranks: Ranks) -> TrainingState:
    return TrainingState.spread(
        words["model"],
        objective_of(ObjectiveSettings.model_validate(words["objective"])),
        TrainSettings.model_validate(words["train"]),
        ranks,
        reference=words["reference"],
    )


def _obey(
    state: TrainingState, order: str, words: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    match order:
        case "step":
            minibatches = [arrays[f"{MINIBATCH}{index}"] for index in range(words["minibatches"])]
            whole = {name: array for name, array in arrays.items() if not name.startswith(MINIBATCH)}
            batch = BatchArrays(**whole, nodes=(), keys=(), groups_without_spread=0)
            with products_in(words["dtype"]):
                state.step(batch, minibatches, lambda: None)
        case "read":
            state.read(words["name"], words["key"])
        case "write":
            scalar = torch.tensor(words["scalar"]) if words["scalar"] is not None else None
            state.write(words["name"], words["key"], scalar, scalar=scalar is not None)
        case "forget":
            state.forget()
        case _:
            raise RuntimeError(f"an order this version does not know: {order}")
