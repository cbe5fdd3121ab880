"""From a learner's home to a Hugging Face folder: the newest checkpoint, an adapter folded into its base."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError

from .adapter import Base, MergedWeights, base_of
from .checkpoint import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoints, load_tensors, open_tensors
from .config import CHECKPOINTS_FOLDER
from .home import base_model
from .hugging_face import read_shapes, write_folder
from .prepare import new_folder
from .reading import reading
from .weights_file import DTYPES, Weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from .interfaces import Progress


def export_home(home: Path, out: Path, *, model_dir: Path | None, dtype: str) -> Progress:
    """Makes the Hugging Face folder `out` of the newest whole checkpoint in `home`, or nothing at all.

    `model_dir` is the folder that the run began with, when it is not where the learner last found it. `dtype`: a key of
    `weights_file.DTYPES`. May be called while the learner trains. Raises ConfigurationError.
    """
    model_dir = base_model(home, model_dir)
    found = Checkpoints(home / CHECKPOINTS_FOLDER, kept=2).restore()
    if found is None:
        raise ConfigurationError(f"{home} has no checkpoint; name the folder that learner.toml calls home")
    progress, checkpoint = found
    with new_folder(out) as folder, ExitStack() as stack:
        with reading(f"the checkpoint {checkpoint}", "cannot be read"):  # a newer one may have pushed it out by now
            weights: Mapping[str, torch.Tensor] = load_tensors(checkpoint, WEIGHTS_FILE)
            with open_tensors(checkpoint, OPTIMIZER_FILE) as stored:
                state = {name: stored.load(name) for name in stored.shapes if "/" not in name}
        known = Base.of_state(state)
        if known is not None:
            base_of(model_dir, known.alpha).check(state, model_dir)
        if known is not None and known.alpha is not None:
            base = stack.enter_context(Weights(model_dir))
            weights = MergedWeights(base, read_shapes(model_dir), weights, known.alpha)
        write_folder(model_dir, weights, folder, DTYPES[dtype])
    return progress
