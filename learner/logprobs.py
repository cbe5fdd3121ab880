"""Log-probabilities of sampled tokens from hidden states, without the logits of more than a chunk of tokens.

A vocabulary is wide: 49,152 float32 logits are 192 KiB a token, several times what a small model keeps for the token in
all its layers. So logits exist for `chunk` tokens at once, and again, chunk by chunk, in the backward pass.

With z = W h / T, p = softmax(z), y the token: log pi = z_y - log sum exp z, and d log pi / dz = onehot(y) - p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    chunk: int,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(W h / T) at each target, and, if asked for, those distributions' entropy in nats: float32 [M], [M].

    hidden [M, H] (any float type), weight [V, H], targets int64 [M], temperature float32 [M]. Gradients reach `hidden`
    and `weight` from the log-probabilities only; the entropy is for showing, and zeros if not asked for.
    """
    outputs = _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk, entropy)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", outputs)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        chosen = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normaliser, spread = torch.empty_like(chosen), torch.zeros_like(chosen)
        for part in _parts(len(targets), chunk):
            logits = _logits(hidden[part], weight, temperature[part])
            # The largest is taken out first, as in any softmax; in place, since a second copy would double the peak.
            top = logits.amax(dim=-1)
            logits.sub_(top[:, None])
            chosen[part] = logits.gather(1, targets[part, None])[:, 0]
            if entropy:
                scaled = logits.exp()
                total = scaled.sum(dim=-1)
                spread[part] = total.log() - torch.bmm(scaled[:, None], logits[:, :, None])[:, 0, 0] / total
            else:
                total = logits.exp_().sum(dim=-1)
            chosen[part] -= total.log()
            normaliser[part] = top + total.log()
        ctx.save_for_backward(hidden, weight, targets, temperature, normaliser)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(spread)
        return chosen, spread

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, normaliser = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in _parts(len(targets), ctx.chunk):
            slope = _logits(hidden[part], weight, temperature[part])
            slope.sub_(normaliser[part, None]).exp_().mul_(-gradient[part, None])
            slope[torch.arange(len(slope), device=slope.device), targets[part]] += gradient[part]
            slope = slope.to(weight.dtype)
            if to_hidden is not None:
                to_hidden[part] = (slope @ weight) / temperature[part, None]
            if to_weight is not None:
                to_weight.addmm_(slope.T, _tempered(hidden[part], weight, temperature[part]))
        return to_hidden, to_weight, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    return (_tempered(hidden, weight, temperature) @ weight.T).float()


def _tempered(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """h / T in the weights' precision: dividing here and not the logits saves a pass over the vocabulary."""
    return (hidden / temperature[:, None]).to(weight.dtype)


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, count)) for first in range(0, count, chunk)]
