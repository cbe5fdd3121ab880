"""Attention over a packed row (`packing.Pack`): stems attend to themselves, branches to their stem and themselves.

Registered with transformers under `PACKED`, so every architecture that takes its attention from there (llama, qwen2,
qwen3) runs it unchanged; everything else in such a model works token by token and needs no padding. Without a layout it
is transformers' own `sdpa`, causal over rows padded on the right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKED = "echo2_packed"

PLAIN_KEYS_MAX = 1024
"""Up to this many keys the attention matrix is written out: forward and backward two to three times as fast as torch's
blocked kernel at the lengths of usual responses. Above, its memory (heads x queries x keys) would outweigh the rest."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A pack's segments, and the masks made for them: one forward has many layers and makes each once."""

    lengths: tuple[int, ...]
    alone: tuple[bool, ...]
    masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """0 where the query may look, -inf where not [queries, keys]; the last query sees the last key."""
        key = (queries, keys, window, like.dtype, like.device)
        if key not in self.masks:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
            if window is not None:
                seen = seen.triu(keys - queries - window + 1)
            self.masks[key] = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
                ~seen, -torch.inf
            )
        return self.masks[key]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """See transformers' attention interface: query [1, H, N, D], key and value [1, Hkv, N, D] to [1, N, H, D]."""
    if layout is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
        return output
    # Split, never slice: the gradient of a split is one concatenation, that of each slice a whole row of zeros.
    queries, keys, values = (torch.split(whole[0], list(layout.lengths), dim=1) for whole in (query, key, value))
    parts, stem = [], 0
    for index, alone in enumerate(layout.alone):
        near_keys, near_values = keys[index], values[index]
        if alone:
            stem = index
        else:
            near_keys = torch.cat([keys[stem], near_keys], dim=1)
            near_values = torch.cat([values[stem], near_values], dim=1)
        parts.append(_attend(queries[index], near_keys, near_values, scaling, sliding_window, layout))
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, layout: Layout) -> Tensor:
    """[H, Q, D] x [Hkv, K, D]: the queries are those of the last Q keys. Heads of one group share their keys."""
    heads, queries, size = query.shape
    shared, keys, _ = key.shape
    mask = layout.mask(queries, keys, window, query)
    if keys > PLAIN_KEYS_MAX:
        return scaled_dot_product_attention(
            query[None],
            key.repeat_interleave(heads // shared, dim=0)[None],
            value.repeat_interleave(heads // shared, dim=0)[None],
            attn_mask=mask,
            scale=scaling,
        )[0]
    grouped = query.reshape(shared, heads // shared * queries, size)
    scores = torch.baddbmm(mask.repeat(heads // shared, 1), grouped, key.transpose(1, 2), alpha=scaling)
    return torch.bmm(scores.softmax(dim=-1), value).view(heads, queries, -1)


AttentionInterface.register(PACKED, packed_attention)
