"""LoRA: the base model stays as it is, and what is trained, kept and published is an adapter of a few megabytes.

A target's weights are W + (alpha / rank) B A, with A [rank, in] and B [out, rank]. A begins at random (from the run's
seed), B at zero, so version 0 is the base model. It is published whole; every later version is a GGUF adapter that
names the base, and a node loads it beside the base without loading that again.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import gguf
import torch

from echo2.p2p.errors import ConfigurationError

from .architectures import architecture_of, gguf_tensor_name, rotated_heads
from .gguf_export import StoredTensor, write_gguf
from .policy import WEIGHTS_FILE
from .quantise import FILE_TYPES, encoding_of
from .reading import reading
from .weights_file import Weights

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from .config import AdapterSettings
    from .quantise import Domain

BASE_KEY = "base_sha256"
ALPHA_KEY = "adapter_alpha"
"""Beside the optimiser's tensors in a checkpoint, whose names all contain a slash."""

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True, slots=True)
class Base:
    """What a run began with: the base model's weights, and alpha where it trains an adapter.

    An adapter is worth nothing without its base. Trained weights are another model's when tokeniser, reference and the
    nodes' base are: a folder of the same shapes is not the same model.
    """

    sha256: bytes
    alpha: float | None

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        state = {BASE_KEY: torch.frombuffer(bytearray(self.sha256), dtype=torch.uint8)}
        return state if self.alpha is None else state | {ALPHA_KEY: _stored(self.alpha)}

    @classmethod
    def of_state(cls, state: Mapping[str, torch.Tensor]) -> Base | None:
        """What a checkpoint says; None when it is of the first releases, which named the base of adapters only."""
        if BASE_KEY not in state:
            return None
        return cls(state[BASE_KEY].numpy().tobytes(), float(state[ALPHA_KEY]) if ALPHA_KEY in state else None)

    def check(self, state: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Raise ConfigurationError unless a checkpoint belongs to this base, which lies in `folder`."""
        known = self.of_state(state)
        if known is None and self.alpha is None:
            return
        if known is None or known.sha256 != self.sha256:
            raise ConfigurationError(
                f"the checkpoint is of a run on another base model than that in {folder}; set model_dir to the "
                "folder the run began with"
            )
        if known.alpha != (None if self.alpha is None else _stored(self.alpha).item()):
            trained = "without an adapter" if known.alpha is None else f"with adapter.alpha = {known.alpha:g}"
            raise ConfigurationError(f"the checkpoint was trained {trained}; set [adapter] to that again")


def base_of(model_dir: Path, alpha: float | None) -> Base:
    """The base in a model folder. Reads the whole file of weights once. Raises ConfigurationError when it cannot."""
    path = model_dir / WEIGHTS_FILE
    with reading(f"the weights that the run began with, {path},", "cannot be read"), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return Base(digest, alpha)


def _stored(alpha: float) -> torch.Tensor:
    return torch.tensor(alpha, dtype=torch.float32)


def add_adapter(model: PreTrainedModel, settings: AdapterSettings, *, seed: int) -> None:
    """Puts an adapter into `model`, whose own parameters are frozen: what requires a gradient is then the adapter.

    torch's own generator is left as it was.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds to load, which most learners have no use for

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        configuration = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
            target_modules=list(settings.targets),
            lora_dropout=0.0,
        )
        inject_adapter_in_model(configuration, model)


def frozen_copy(model: PreTrainedModel, *, shared: bool) -> PreTrainedModel:
    """The model as it is now, for good; to be called before `add_adapter`.

    `shared`: on the very same weights in memory, which an adapter does not change.
    """
    memo = {id(parameter): parameter for parameter in model.parameters()} if shared else {}
    return copy.deepcopy(model, memo).requires_grad_(False)


def export_adapter(
    config: PreTrainedConfig, weights: Mapping[str, torch.Tensor], alpha: float, path: Path, domain: Domain
) -> Path:
    """Writes an adapter as GGUF, durably, to the new file `path`; `weights` are what a checkpoint of it holds.

    In f32 for the domain f32, else in f16: blocks of q8_0 are wider than most ranks, and an adapter is small. Raises as
    `gguf_export.export_weights` does.
    """
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    stored: Domain = "f32" if domain == "f32" else "f16"
    writer.add_file_type(FILE_TYPES[stored])
    tensors = []
    for name, weight in weights.items():
        target, part = _target(name)
        heads = rotated_heads(target, config) if part == "lora_b" else None  # A's rows are of the rank, not of heads
        tensors.append(
            StoredTensor(
                f"{gguf_tensor_name(target, architecture)}.{part}",
                weight.shape,
                encoding_of(weight.shape, stored),
                partial(weights.__getitem__, name),
                heads,
            )
        )
    return write_gguf(writer, tensors, path)


class MergedWeights(Mapping[str, torch.Tensor]):
    """The base's parameters (`names`) with an adapter added, one at a time, in float32. `base` must stay open."""

    def __init__(
        self, base: Weights, names: Mapping[str, Any], adapter: Mapping[str, torch.Tensor], alpha: float
    ) -> None:
        self._base = base
        self._names = names
        self._alpha = alpha
        self._adapter: dict[str, dict[str, torch.Tensor]] = {}
        for name, weight in adapter.items():
            target, part = _target(name)
            self._adapter.setdefault(target, {})[part] = weight
        unknown = self._adapter.keys() - names.keys()
        if unknown:
            raise ConfigurationError(f"the adapter is not of this model: it changes {min(unknown)}")

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._base.tensor(name).float()
        parts = self._adapter.get(name)
        if parts is None:
            return weight
        a, b = parts["lora_a"].float(), parts["lora_b"].float()
        return weight + (self._alpha / len(a)) * (b @ a)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _target(name: str) -> tuple[str, str]:
    """The weight that an adapter's parameter changes, and which of the two it is."""
    for ending, part in ((_A, "lora_a"), (_B, "lora_b")):
        if name.endswith(ending):
            return name.removesuffix(ending) + ".weight", part
    raise ConfigurationError(f"{name} is not a parameter of an adapter")
