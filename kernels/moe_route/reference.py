"""moe_route in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = (16, 32, 64, 128)
"""Rows of a tile of the grouped matmul."""


def reference(
    logits: Tensor,
    gate_scales: Tensor,
    gather_index: Tensor,
    scatter_index: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_offsets: Tensor,
    tile_map: Tensor,
) -> dict[str, Tensor]:
    """The values of all outputs, integers included, as float64.

    Args:
        logits: [tokens, experts], any float dtype.
        gate_scales, gather_index, scatter_index: [tokens * top_k], only written.
        histogram: [experts]; token_offsets: [experts + 1]; tile_offsets: [4, experts + 1].
        tile_map: [4, tiles]; its previous contents do not matter.
    """
    top_k = len(gather_index) // len(logits)
    found = _routed(logits, top_k, tile_map.shape[1], torch.float64)
    return {name: value.double() for name, value in found.items()}


def control(
    logits: Tensor,
    gate_scales: Tensor,
    gather_index: Tensor,
    scatter_index: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_offsets: Tensor,
    tile_map: Tensor,
) -> dict[str, Tensor]:
    """`reference` with the softmax in bfloat16, like a kernel with bfloat16 arithmetic."""
    top_k = len(gather_index) // len(logits)
    found = _routed(logits, top_k, tile_map.shape[1], torch.bfloat16)
    found["gate_scales"] = found["gate_scales"].to(gate_scales.dtype)
    return found


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
