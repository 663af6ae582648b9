"""rope in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(query: Tensor, key: Tensor, cos_sin: Tensor) -> dict[str, Tensor]:
    """The float64 values of `query` and `key`.

    Args:
        query: [tokens, q_heads, head_dim], any float dtype.
        key: [tokens, kv_heads, head_dim], any float dtype.
        cos_sin: [tokens, head_dim], cosines then sines.
    """
    wide = torch.float64
    return {"query": _turned(query, cos_sin, wide), "key": _turned(key, cos_sin, wide)}


def control(query: Tensor, key: Tensor, cos_sin: Tensor) -> dict[str, Tensor]:
    """`reference` with every product and sum rounded to bfloat16."""
    narrow = torch.bfloat16
    return {
        "query": _turned(query, cos_sin, narrow).to(query.dtype),
        "key": _turned(key, cos_sin, narrow).to(key.dtype),
    }


def _turned(heads: Tensor, cos_sin: Tensor, dtype: torch.dtype) -> Tensor:
    first, second = heads.to(dtype).chunk(2, -1)
    cos, sin = cos_sin.to(dtype).unsqueeze(1).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
