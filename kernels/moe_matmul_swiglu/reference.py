"""moe_matmul_swiglu in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
STEP = 32
"""Numbers along k that share a scale."""


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
    """The float64 value of `output`, whose previous contents do not matter.

    Args:
        x: [tokens, hidden], any float dtype.
        weights: [experts, inner / 2, 2 * hidden], uint8 in Hopper's layout; scales:
            [experts, 8 for each 256 of 2 * inner, hidden], uint8; bias: [experts, 2 * inner].
        gather_index: [rows]; histogram: [experts]; token_offsets: [experts + 1], integers.
        tile_map: unused.
        output: [rows, inner], only written.
    """
    rows = x[gather_index.long() // (len(gather_index) // len(x))].double()
    found = rows.new_zeros(output.shape)
    offsets = token_offsets.tolist()
    places = laid_out(bias.shape[1], x.shape[1], x.device)
    table = numbers(x.device)
    for expert in range(len(weights)):
        begin, end = offsets[expert : expert + 2]
        if begin < end:
            wide = dequantised(weights[expert], scales[expert], places, table).double()
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
    """`reference` with sums and activation in bfloat16."""
    rows = x[gather_index.long() // (len(gather_index) // len(x))].float()
    found = output.new_zeros(output.shape)
    offsets = token_offsets.tolist()
    places = laid_out(bias.shape[1], x.shape[1], x.device)
    table = numbers(x.device)
    for expert in range(len(weights)):
        begin, end = offsets[expert : expert + 2]
        if begin < end:
            wide = dequantised(weights[expert], scales[expert], places, table)
            hidden = bias[expert].bfloat16()
            for part, other in zip(
                rows[begin:end].split(STEP, 1), wide.split(STEP, 1), strict=True
            ):
                hidden = hidden + (part @ other.T).bfloat16()
            gate, up = hidden[:, ::2].clamp(max=limit), hidden[:, 1::2].clamp(-limit, limit)
            found[begin:end] = (gate / (1 + torch.exp(-alpha * gate)) * (up + 1)).to(found.dtype)
    return {"output": found}


def laid_out(columns: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where each number (n, k) lies in Hopper's layout: three int32 tensors [columns * depth].

    They are the index of its 16-bit half, its position among the half's four numbers (times 2^16),
    and the index of its scale.
    """
    n = torch.arange(columns, device=device, dtype=torch.int32).unsqueeze(1)
    k = torch.arange(depth, device=device, dtype=torch.int32).unsqueeze(0)
    word = n % 2 * 16 + k // 2 % 4 * 4 + k // 16 % 4
    half = (n // 16 * 4 + n % 8 // 2) * depth + 2 * (k // 64 * 32 + word) + k % 2
    which = k // 8 % 2 * 2 + n // 8 % 2
    column = k // 64 * 64 + n // 128 % 2 * 32 + n % 8 * 4 + k // 32 % 2 * 2 + n // 8 % 2
    scale = (n // 256 * 8 + n // 16 % 8) * depth + column
    return half.flatten(), (which << 16).flatten(), scale.flatten()


def numbers(device: torch.device) -> Tensor:
    """The four numbers of every 16-bit half, float32 [4 * 2^16].

    Number `which` of `half` is at `which * 2^16 + half`.
    """
    half = torch.arange(1 << 16, device=device)
    codes = [half << 3 * which >> 6 & 7 for which in range(3)]
    codes.append((half >> 9 & 6) | (half >> 13 & 1))
    signs = [half << 3 * which >> 15 & 1 for which in range(3)] + [half >> 14 & 1]
    table = torch.tensor(FP4, device=device)
    return torch.cat([table[c] * (1 - 2 * s) for c, s in zip(codes, signs, strict=True)])


def dequantised(
    weights: Tensor, scales: Tensor, places: tuple[Tensor, Tensor, Tensor], table: Tensor
) -> Tensor:
    """One expert's weights [columns, depth], float32, element by element."""
    half, which, scale = places
    halves = weights.view(torch.int16).flatten().index_select(0, half).int() & 0xFFFF
    number = table.index_select(0, halves | which)
    factor = torch.exp2(scales.float() - 127).flatten().index_select(0, scale)
    return (number * factor).view(-1, weights.shape[1] // 2)
