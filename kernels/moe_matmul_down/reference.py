"""moe_matmul_down in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
STEP = 32
"""Numbers along k that have one scale."""


def reference(
    x: Tensor,
    weights: Tensor,
    scales: Tensor,
    bias: Tensor,
    gate_scales: Tensor,
    row_map: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_map: Tensor,
    output: Tensor,
) -> dict[str, Tensor]:
    """float64 value of `output`; what it held before does not matter.

    Args:
        x: [rows, inner], any float dtype.
        weights: [experts, hidden / 4, 2 * inner], uint8 in Hopper's layout; scales:
            [experts, 8 for each 256 of hidden, inner], uint8; bias: [experts, hidden].
        gate_scales: [rows]; token_offsets: [experts + 1], integers.
        row_map, histogram, tile_map: not needed here.
        output: [rows, hidden], only written.
    """
    found = x.new_zeros(output.shape, dtype=torch.float64)
    offsets = token_offsets.tolist()
    for expert in range(len(weights)):
        begin, end = offsets[expert : expert + 2]
        if begin < end:
            wide = dequantised(weights[expert], scales[expert], bias.shape[1]).double()
            found[begin:end] = x[begin:end].double() @ wide.T + bias[expert].double()
    return {"output": found * gate_scales.double().unsqueeze(1)}


def control(
    x: Tensor,
    weights: Tensor,
    scales: Tensor,
    bias: Tensor,
    gate_scales: Tensor,
    row_map: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_map: Tensor,
    output: Tensor,
) -> dict[str, Tensor]:
    """The same with sums and products in bfloat16."""
    found = output.new_zeros(output.shape)
    offsets = token_offsets.tolist()
    for expert in range(len(weights)):
        begin, end = offsets[expert : expert + 2]
        if begin < end:
            wide = dequantised(weights[expert], scales[expert], bias.shape[1])
            rows, scale = x[begin:end].float(), gate_scales[begin:end].unsqueeze(1)
            total = bias[expert].bfloat16()
            for part, other in zip(rows.split(STEP, 1), wide.split(STEP, 1), strict=True):
                total = total + (part @ other.T).bfloat16()
            found[begin:end] = (total * scale.bfloat16()).to(found.dtype)
    return {"output": found}


def dequantised(weights: Tensor, scales: Tensor, columns: int) -> Tensor:
    """One expert's weights [columns, k], float32, element by element from Hopper's layout."""
    words = weights.view(torch.int32)
    n = torch.arange(columns, device=weights.device).unsqueeze(1)
    k = torch.arange(weights.shape[1] // 2, device=weights.device).unsqueeze(0)
    word = words[n // 16 * 4 + n % 8 // 2, k // 64 * 32 + n % 2 * 16 + k // 2 % 4 * 4 + k // 16 % 4]
    half = (word >> (k % 2 * 16)) & 0xFFFF
    which = k // 8 % 2 * 2 + n // 8 % 2
    moved = half << (3 * which)
    last = which == 3
    code = torch.where(last, (half >> 9 & 6) | (half >> 13 & 1), moved >> 6 & 7)
    negative = torch.where(last, half >> 14, moved >> 15) & 1
    number = torch.tensor(FP4, device=weights.device)[code.long()] * (1 - 2 * negative)
    scale = scales[
        n // 256 * 8 + n // 16 % 8,
        k // 64 * 64 + n // 128 % 2 * 32 + n % 8 * 4 + k // 32 % 2 * 2 + n // 8 % 2,
    ]
    return number * torch.exp2(scale.float() - 127)
