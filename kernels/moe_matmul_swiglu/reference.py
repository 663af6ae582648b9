"""moe_matmul_swiglu in plain PyTorch: the float64 reference and the control that must fail."""

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
    gather_index: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_map: Tensor,
    output: Tensor,
    alpha: float,
    limit: float,
) -> dict[str, Tensor]:
    """float64 value of `output`; what it held before does not matter.

    Args:
        x: [tokens, hidden], any float dtype.
        weights: [experts, inner / 2, 2 * hidden], uint8 in Hopper's layout; scales:
            [experts, 8 for each 256 of 2 * inner, hidden], uint8; bias: [experts, 2 * inner].
        gather_index: [rows]; histogram: [experts]; token_offsets: [experts + 1], integers.
        tile_map: not needed here.
        output: [rows, inner], only written.
    """
    rows = x[gather_index.long() // (len(gather_index) // len(x))].double()
    found = rows.new_zeros(output.shape)
    offsets = token_offsets.tolist()
    for expert in range(len(weights)):
        begin, end = offsets[expert : expert + 2]
        if begin < end:
            wide = dequantised(weights[expert], scales[expert], bias.shape[1]).double()
            hidden = rows[begin:end] @ wide.T + bias[expert].double()
            # fmin and fmax drop a NaN, as the engine's kernel does
            high = torch.full_like(hidden[:, ::2], limit)
            gate = torch.fmin(hidden[:, ::2], high)
            up = torch.fmax(torch.fmin(hidden[:, 1::2], high), -high)
            found[begin:end] = gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
    return {"output": found}


def control(
    x: Tensor,
    weights: Tensor,
    scales: Tensor,
    bias: Tensor,
    gather_index: Tensor,
    histogram: Tensor,
    token_offsets: Tensor,
    tile_map: Tensor,
    output: Tensor,
    alpha: float,
    limit: float,
) -> dict[str, Tensor]:
    """The same with sums and activation in bfloat16."""
    rows = x[gather_index.long() // (len(gather_index) // len(x))].float()
    found = output.new_zeros(output.shape)
    offsets = token_offsets.tolist()
    for expert in range(len(weights)):
        begin, end = offsets[expert : expert + 2]
        if begin < end:
            wide = dequantised(weights[expert], scales[expert], bias.shape[1])
            hidden = bias[expert].bfloat16()
            for part, other in zip(
                rows[begin:end].split(STEP, 1), wide.split(STEP, 1), strict=True
            ):
                hidden = hidden + (part @ other.T).bfloat16()
            gate, up = hidden[:, ::2].clamp(max=limit), hidden[:, 1::2].clamp(-limit, limit)
            found[begin:end] = (gate / (1 + torch.exp(-alpha * gate)) * (up + 1)).to(found.dtype)
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
