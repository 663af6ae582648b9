"""qkv_rope_kv_update in plain PyTorch: reference, unchanged elements and control."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OPS = Path(__file__).parent.parent
_LINEAR, _ROPE = (
    runpy.run_path(str(_OPS / name / "reference.py")) for name in ("linear", "rope_kv_update")
)
kept = _ROPE["kept"]
"""Masks of the elements of the caches that no slot refers to."""


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, query: Tensor, key_cache: Tensor, **rest: Tensor
) -> dict[str, Tensor]:
    """The float64 values of `query` and of the whole caches.

    Args:
        x: [tokens, inner], any float dtype.
        weight: [(q_heads + 2 * kv_heads) * head_dim, inner], likewise.
        bias: [(q_heads + 2 * kv_heads) * head_dim], or [0] for none.
        query: [tokens, q_heads * head_dim], only written.
        key_cache: [blocks, block_size, kv_heads, head_dim].
        rest: positions, cos_sin, slots and value_cache, as in rope_kv_update.
    """
    return _in_turn("reference", x, weight, bias, query, key_cache, **rest)


def control(
    x: Tensor, weight: Tensor, bias: Tensor, query: Tensor, key_cache: Tensor, **rest: Tensor
) -> dict[str, Tensor]:
    """`reference` with running sums and the rotation in bfloat16; other elements are unchanged."""
    found = _in_turn("control", x, weight, bias, query, key_cache, **rest)
    return {**found, "query": found["query"].to(query.dtype)}


def _in_turn(
    kind: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    query: Tensor,
    key_cache: Tensor,
    **rest: Any,
) -> dict[str, Tensor]:
    """What `linear` does, then what `rope_kv_update` does without a bias."""
    row: Tensor = _LINEAR[kind](x, weight, bias, torch.empty(len(x), len(weight)))["output"]
    kv_size = key_cache.shape[2] * key_cache.shape[3]
    parts = row.split([query.shape[1], kv_size, kv_size], 1)
    named = dict(zip(("query", "key", "value"), parts, strict=True))
    found: dict[str, Tensor] = _ROPE[kind](
        **named, bias=row.new_empty(0), key_cache=key_cache, **rest
    )
    return found
