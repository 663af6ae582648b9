"""quantize_nvfp4 in plain PyTorch: the float64 reference, the honest quantiser and the control."""

from __future__ import annotations

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def reference(x: Tensor, packed: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """float64 values that `packed` and `scales` stand for together: x, as far as they go.

    Args:
        x: [rows, n]; packed: [rows, n / 2], two numbers a byte; scales: [rows, n / 16].
    """
    return {"packed": x.double().clamp(-6 * 448.0, 6 * 448.0)}


def control(x: Tensor, packed: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The same with numbers of one bit less: 1, 2, 4 and nothing between."""
    coarse = (0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)
    found = quantised(x, coarse)
    return {"packed": found[0], "scales": found[1]}


def quantised(x: Tensor, numbers: tuple[float, ...] = FP4) -> tuple[Tensor, Tensor]:
    """Packed numbers and their scales."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    wanted = blocks / scales.float().unsqueeze(-1)
    table = torch.tensor(numbers, device=x.device)
    distance = (wanted.abs().unsqueeze(-1) - table).abs()
    codes = distance.argmin(-1) + 8 * wanted.signbit()
    codes = codes.flatten(-2).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return packed.view(torch.float4_e2m1fn_x2), scales
