"""From a learner's home to a Hugging Face folder: the newest checkpoint, an adapter folded into its base."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from echo2.p2p.errors import ConfigurationError

from .adapter import AdapterBase, MergedWeights, base_of
from .architectures import parameter_shapes
from .checkpoint import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoints, load_tensors, open_tensors
from .config import CHECKPOINTS_FOLDER, MODEL_DIR_FILE
from .hugging_face import write_folder
from .prepare import new_folder
from .weights_file import DTYPES, Weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .interfaces import Progress


def export_home(home: Path, out: Path, *, model_dir: Path | None, dtype: str) -> Progress:
    """Makes the Hugging Face folder `out` of the newest whole checkpoint in `home`, or nothing at all.

    `model_dir` is the folder that the run began with, when it is not where the learner last found it. `dtype`: a key of
    `weights_file.DTYPES`. May be called while the learner trains. Raises ConfigurationError.
    """
    model_dir = model_dir or _known_model_dir(home)
    found = Checkpoints(home / CHECKPOINTS_FOLDER, kept=2).restore()
    if found is None:
        raise ConfigurationError(f"{home} has no checkpoint; name the folder that learner.toml calls home")
    progress, checkpoint = found
    with new_folder(out) as folder, ExitStack() as stack:
        weights: Mapping[str, torch.Tensor] = load_tensors(checkpoint, WEIGHTS_FILE)
        with open_tensors(checkpoint, OPTIMIZER_FILE) as stored:
            state = {name: stored.load(name) for name in stored.shapes if "/" not in name}
        adapter = AdapterBase.of_state(state)
        if adapter is not None:
            base_of(model_dir, adapter.alpha).check(state)
            base = stack.enter_context(Weights(model_dir))
            names = parameter_shapes(AutoConfig.from_pretrained(model_dir, local_files_only=True))
            weights = MergedWeights(base, names, weights, adapter.alpha)
        write_folder(model_dir, weights, folder, DTYPES[dtype])
    return progress


def _known_model_dir(home: Path) -> Path:
    try:
        return Path((home / MODEL_DIR_FILE).read_text(encoding="utf-8").strip())
    except OSError as error:
        raise ConfigurationError(
            f"{home} does not say which model it began with; name its folder with --model-dir"
        ) from error
