"""A model whose weights, gradients and optimiser state are spread over the learner's processes: torch's FSDP2.

Each process holds a piece of every tensor, cut along its first dimension. A layer's weights are gathered when it is
evaluated and let go after it; gradients are summed over the processes (not averaged: the scale of a token is that of
the whole minibatch, `loss.token_scales`) as they are spread again.

A model is never whole in a process that is not the first. Tensors come and go one at a time.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from .adapter import add_adapter
from .architectures import named_architecture
from .attention import PACKED
from .policy import packed_logprobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from .config import AdapterSettings
    from .packing import Pack
    from .ranks import Ranks

METHOD = "echo2_packed_logprobs"
"""On the model, and known to FSDP: the weights it needs are there while it runs."""


def sharded_model(
    config: Mapping[str, Any],
    ranks: Ranks,
    *,
    dtype: str,
    source: PreTrainedModel | None,
    adapter: tuple[AdapterSettings, int] | None = None,
) -> Any:
    """The model of this configuration (config.json), spread over all processes; all must call it.

    `source` is the whole model, on the first process; None on the others. `adapter`, settings and seed, is added to
    both before the model is spread. `dtype` as in `[train]`: on GPUs "bf16" means
    that layers are gathered and evaluated in it; weights, sums of gradients and the optimiser stay float32.
    """
    kind = named_architecture(config["model_type"]).model
    settings = kind.config_class.from_dict(dict(config))
    settings._attn_implementation = PACKED
    settings.use_cache = False
    with torch.device("meta"):
        model = kind(settings).eval()
    if adapter is not None:
        for whole_or_empty in filter(None, (model, source)):
            add_adapter(whole_or_empty, adapter[0], seed=adapter[1])
    shard(model, ranks, dtype=dtype)
    model.to_empty(device=ranks.device)
    weights = {} if source is None else dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        fill(parameter, weights.get(name), ranks)
    # What is no weight is derived from the configuration when a model is made, and was not made on "meta".
    tables = {} if source is None else dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        value = torch.zeros(buffer.shape, dtype=buffer.dtype) if source is None else tables[name].to(buffer.dtype)
        buffer.copy_(ranks.sum(value))
    return model


def shard(model: PreTrainedModel, ranks: Ranks, *, dtype: str) -> None:
    """Spread the model's layers, each by itself, then the rest of it."""
    narrow = ranks.device.type == "cuda" and dtype == "bf16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": ranks.mesh} | ({"mp_policy": policy} if narrow else {})
    for layer in model.get_decoder().layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows sums, and no products
    setattr(model, METHOD, types.MethodType(packed_logprobs, model))
    register_fsdp_forward_method(model, METHOD)


def sharded_logprobs(
    model: PreTrainedModel, pack: Pack, targets: Tensor, temperature: Tensor, *, chunk: int, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """As `policy.packed_logprobs`, of this process's own pack; all processes must be evaluating one."""
    result = cast(
        "tuple[Tensor, Tensor]", getattr(model, METHOD)(pack, targets, temperature, chunk=chunk, entropy=entropy)
    )
    if not torch.is_grad_enabled():
        # No backward pass will let go of what was gathered outside the layers, and an update would not reach it.
        cast("Any", model).reshard()
    return result


def fill(sharded: Tensor, value: Tensor | None, ranks: Ranks) -> None:
    """Give each process its piece of `value`, which the first process has; all must call it."""
    assert isinstance(sharded, DTensor)
    whole = torch.empty(sharded.shape, dtype=sharded.dtype, device=ranks.device)
    if value is not None:
        whole.copy_(value.detach())
    pieces = distribute_tensor(whole, ranks.mesh, sharded.placements, src_data_rank=0)
    with torch.no_grad():
        sharded.to_local().copy_(pieces.to_local())


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all processes when it is spread; then all must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
