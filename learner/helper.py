"""A learner's process that is not the first: it holds a shard and does what the first one orders, until told to end."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from echo2.p2p.daemon import EXIT_FAILED

from .config import AdapterSettings, ObjectiveSettings, TrainSettings
from .loss import objective_of
from .orders import END, FORGET, NOTHING, READ, SPREAD, STEP, WRITE, unpack_step
from .products import products_in
from .ranks import Ranks
from .training_state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .launch import Place

log = logging.getLogger(__name__)


def serve(place: Place, *, seconds: float, threads: int) -> None:
    """Take orders until the first process says it is the end; end the process when anything goes wrong."""
    torch.set_num_threads(threads)
    try:
        _serve(place, seconds)
    except Exception:
        log.exception("process %d of %d of the learner failed", place.rank, place.size)
        os._exit(EXIT_FAILED)  # an orderly end would wait for the others, who wait for this one


def _serve(place: Place, seconds: float) -> None:
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


def _spread(words: Mapping[str, Any], ranks: Ranks) -> TrainingState:
    adapter = words["adapter"]
    return TrainingState.spread(
        words["model"],
        objective_of(ObjectiveSettings.model_validate_json(words["objective"])),
        TrainSettings.model_validate_json(words["train"]),
        ranks,
        reference=words["reference"],
        adapter=None if adapter is None else (AdapterSettings.model_validate_json(adapter), words["seed"]),
    )


def _obey(state: TrainingState, order: str, words: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    if order == STEP:
        batch, minibatches = unpack_step(arrays)
        with products_in(words["dtype"]):
            state.step(batch, minibatches, lambda: None)
    elif order == READ:
        state.read(words["name"], words["key"])
    elif order == WRITE:
        scalar = None if words["scalar"] is None else torch.tensor(words["scalar"])
        state.write(words["name"], words["key"], scalar)
    elif order == FORGET:
        state.forget()
    else:
        raise RuntimeError(f"an order that this version does not know: {order}")
