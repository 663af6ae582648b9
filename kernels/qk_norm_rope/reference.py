"""qk_norm_rope in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    query: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, epsilon: float
) -> dict[str, Tensor]:
    """The float64 values of `query` and `key`.

    Args:
        query: [tokens, q_heads * head_dim], any float dtype.
        key: [tokens, kv_heads * head_dim], any float dtype.
        q_weight, k_weight: [head_dim], any float dtype.
        cos_sin: [tokens, head_dim], cosines then sines.
        epsilon: added to the mean square.
    """
    wide = torch.float64
    return {
        "query": _turned(query, q_weight, cos_sin, epsilon, wide),
        "key": _turned(key, k_weight, cos_sin, epsilon, wide),
    }


def control(
    query: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, epsilon: float
) -> dict[str, Tensor]:
    """`reference` with every intermediate in bfloat16; a judge that accepts it does not
    discriminate.
    """
    narrow = torch.bfloat16
    return {
        "query": _turned(query, q_weight, cos_sin, epsilon, narrow).to(query.dtype),
        "key": _turned(key, k_weight, cos_sin, epsilon, narrow).to(key.dtype),
    }


def _turned(
    rows: Tensor, weight: Tensor, cos_sin: Tensor, epsilon: float, dtype: torch.dtype
) -> Tensor:
    heads = rows.to(dtype).unflatten(1, (-1, len(weight)))
    scale = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + epsilon)
    first, second = (heads * scale * weight.to(dtype)).chunk(2, -1)
    cos, sin = cos_sin.to(dtype).unsqueeze(1).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(1)
