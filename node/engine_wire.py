"""Frames between the node and its engine process: 4-byte big-endian length, msgpack map. Pure.

The engine process parses files made elsewhere, so its replies are checked like a stranger's: size first, then schema.
Requests: {"op": "load", "path", "sha256", "adapter": null | [path, sha256]} | {"op": "generate", "orders": [...]}.
Replies: {"ok": true, "slices": [...]} or {"ok": false, "kind": "order" | "snapshot" | "engine", "detail"}.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack
from pydantic import ValidationError

from echo2.p2p.messages import SAMPLES_MAX, SLICES_MAX, TOKENS_MAX, RolloutRecord, Sampling

from .engine import EngineError, SliceOrder, SliceResult

LENGTH = struct.Struct(">I")

REQUEST_BYTES_MAX = SLICES_MAX * (4 * TOKENS_MAX + 4096)
"""A full batch of the longest prompts."""

REPLY_BYTES_MAX = 256 << 20
"""Far above what one submission may carry (16 MiB a frame, up to 64 slices); bounds what a broken child can cost."""

DETAIL_CHARACTERS_MAX = 400


def pack(message: dict[str, Any], bound: int) -> bytes:
    """A frame. Raises EngineError when it is above `bound`."""
    body = bytes(msgpack.packb(message, use_bin_type=True))
    if len(body) > bound:
        raise EngineError(f"an engine message of {len(body)} bytes is above its bound of {bound}")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """The map in a frame's body. Raises EngineError when it is not one."""
    try:
        message = msgpack.unpackb(body, raw=False, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise EngineError("an engine message is not msgpack") from error
    if not isinstance(message, dict):
        raise EngineError("an engine message is not a map")
    return message


def orders_out(orders: Sequence[SliceOrder]) -> list[list[Any]]:
    """Orders as plain values."""
    return [
        [o.seed, o.sample_first, o.sample_count, o.prompt_tokens, list(o.sampling.model_dump().values()), o.drawn]
        for o in orders
    ]


def orders_in(values: Sequence[Any]) -> list[SliceOrder]:
    """The reverse of `orders_out`; the parent is trusted, so a mistake here is a bug."""
    fields = tuple(Sampling.model_fields)
    return [
        SliceOrder(seed, first, count, prompt, Sampling(**dict(zip(fields, sampling, strict=True))), drawn)
        for seed, first, count, prompt, sampling, drawn in values
    ]


def slices_out(results: Sequence[SliceResult]) -> list[list[Any]]:
    """Results as plain values."""
    return [[[r.sample, r.tokens, r.logprobs, r.finish] for r in result.rollouts] for result in results]


def slices_in(values: Any, orders: Sequence[SliceOrder]) -> list[SliceResult]:
    """Results of `orders`, checked against them. Raises EngineError."""
    try:
        results = [
            SliceResult(
                tuple(
                    RolloutRecord(sample=sample, tokens=tokens, logprobs=logprobs, finish=finish)
                    for sample, tokens, logprobs, finish in rollouts
                )
            )
            for rollouts in values
        ]
    except (ValueError, TypeError, ValidationError) as error:
        raise EngineError("the engine's reply is not a list of rollouts") from error
    if len(results) != len(orders) or len(results) > SLICES_MAX * SAMPLES_MAX:
        raise EngineError(f"the engine returned {len(results)} slices for {len(orders)} orders")
    for result, order in zip(results, orders, strict=True):
        samples = range(order.sample_first, order.sample_first + order.sample_count)
        if [rollout.sample for rollout in result.rollouts] != list(samples):
            raise EngineError("the engine returned other samples than were ordered")
        for rollout in result.rollouts:
            if not 4 <= len(rollout.tokens) == len(rollout.logprobs) <= 4 * order.sampling.tokens_max:
                raise EngineError("the engine returned a rollout of a wrong length")
    return results
