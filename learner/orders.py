"""What the first process orders its helpers to do, and how a batch travels with it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .batch import BatchArrays

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

NOTHING, END = "nothing", "end"
"""To be heard, and to let go: `team`'s own."""

SPREAD, STEP, READ, WRITE, FORGET = "spread", "step", "read", "write", "forget"
"""Each is one call of the same name on every process's `training_state.TrainingState`."""

MINIBATCH = "minibatch"


def pack_step(arrays: BatchArrays, minibatches: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
    """A batch and its minibatches for the helpers, which need not know who made its rollouts."""
    parts = {f"{MINIBATCH}{index}": rows for index, rows in enumerate(minibatches)}
    return parts | {
        "tokens": arrays.tokens,
        "mask": arrays.mask,
        "sampler_logprobs": arrays.sampler_logprobs,
        "advantages": arrays.advantages,
        "temperature": arrays.temperature,
        "group": arrays.group,
    }


def unpack_step(arrays: Mapping[str, NDArray[Any]]) -> tuple[BatchArrays, list[NDArray[np.int64]]]:
    """The inverse of `pack_step`, but for the names it leaves out."""
    parts = [name for name in arrays if name.startswith(MINIBATCH)]
    batch = BatchArrays(
        **{name: array for name, array in arrays.items() if name not in parts},
        nodes=(),
        keys=(),
        groups_without_spread=0,
    )
    return batch, [arrays[f"{MINIBATCH}{index}"] for index in range(len(parts))]
