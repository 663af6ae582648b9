"""add_rms_norm_route in plain PyTorch: reference, what follows from the logits, and control."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCKS = (16, 32, 64, 128)
"""Rows of a tile of the grouped matmul."""
_PARTS = 16
"""The number of parts into which the control splits each sum of the router."""


def reference(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    logits: Tensor,
    epsilon: float,
    **tables: Tensor,
) -> dict[str, Tensor]:
    """The float64 values of `input`, `residual` and `logits`, and the tables that these logits
    determine once they are rounded.

    Args:
        input, residual: [tokens, hidden], any float dtype.
        weight: [hidden]; router_weight: [experts, hidden]; router_bias: [experts], or [0] for none.
        logits: [tokens, experts], only written.
        epsilon: added to the mean square.
        tables: as in moe_route, only written.
    """
    total = residual.double() + input.double()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon) * weight.double()
    added = router_bias.double() if router_bias.numel() else 0.0
    found = {"input": normed, "residual": total}
    found["logits"] = normed @ router_weight.double().T + added
    return found | derived(found["logits"].to(logits.dtype), **tables)


def derived(logits: Tensor, **others: Any) -> dict[str, Tensor]:
    """What the written logits determine: the routing of moe_route, as float64."""
    top_k = len(others["gather_index"]) // len(logits)
    found = _routed(logits, top_k, others["tile_map"].shape[1], torch.float64)
    return {name: value.double() for name, value in found.items()}


def control(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    router_weight: Tensor,
    router_bias: Tensor,
    logits: Tensor,
    epsilon: float,
    **tables: Tensor,
) -> dict[str, Tensor]:
    """`reference` with sums, products and the softmax in bfloat16."""
    narrow = torch.bfloat16
    total = residual.to(narrow) + input.to(narrow)
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    normed = total * scale * weight.to(narrow)
    added = router_bias if router_bias.numel() else router_weight.new_zeros(len(router_weight))
    sums = added.to(narrow).expand(logits.shape)
    parts = normed.chunk(_PARTS, 1), router_weight.chunk(_PARTS, 1)
    for left, right in zip(*parts, strict=True):
        sums = (sums.float() + left.float() @ right.float().T).to(narrow)
    found = {"input": normed.to(input.dtype), "residual": total.to(residual.dtype)}
    found["logits"] = sums.to(logits.dtype)
    top_k = len(tables["gather_index"]) // len(logits)
    routed = _routed(found["logits"], top_k, tables["tile_map"].shape[1], narrow)
    routed["gate_scales"] = routed["gate_scales"].to(tables["gate_scales"].dtype)
    return found | routed


def _routed(logits: Tensor, top_k: int, tiles: int, dtype: torch.dtype) -> dict[str, Tensor]:
    experts = logits.shape[1]
    bits = logits.float().view(torch.int32)
    # ascending as whole numbers where the floats ascend: below 0, the larger the bits the smaller
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    chosen = torch.argsort(order, dim=1, descending=True, stable=True)[:, :top_k].sort(1).values
    # step by step, so that each intermediate is rounded to dtype
    picked = logits.gather(1, chosen).to(dtype)
    weights = (picked - picked.amax(1, keepdim=True)).exp()
    total = torch.zeros_like(weights[:, :1])
    for k in range(top_k):
        total = total + weights[:, k : k + 1]
    flat = chosen.flatten()
    gather = torch.argsort(flat, stable=True)
    histogram = torch.nn.functional.one_hot(flat, experts).sum(0)
    tile_counts = torch.stack([(histogram + block - 1) // block for block in BLOCKS])
    tile_map = torch.full((len(BLOCKS), tiles), -1, dtype=torch.int64, device=logits.device)
    for row, counts in zip(tile_map, tile_counts, strict=True):
        expert = torch.repeat_interleave(torch.arange(experts, device=row.device), counts)
        first = (counts.cumsum(0) - counts)[expert]
        block = torch.arange(len(expert), device=row.device) - first
        row[: len(expert)] = block * 65536 + expert
    return {
        "gate_scales": (weights / total).flatten()[gather],
        "gather_index": gather.int(),
        "scatter_index": torch.argsort(gather).int(),
        "histogram": histogram.int(),
        "token_offsets": _exclusive(histogram).int(),
        "tile_offsets": _exclusive(tile_counts).int(),
        "tile_map": tile_map.int(),
    }


def _exclusive(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
