"""moe_block in plain PyTorch: reference, what follows from the logits, and the control."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PARTS = 32
"""The number of parts into which the control splits each sum."""


def reference(**given: Any) -> dict[str, Tensor]:
    """The float64 values of `logits`, and of all that these determine once they are rounded.

    Args:
        given: the tensors and scalars of the contract by name. `logits`, `chosen`, `total` and
            `output` are only written: of the first the dtype counts, of the second the shape.
    """
    logits = _logits(given, torch.float64)
    return {"logits": logits, **derived(**given | {"logits": logits.to(given["logits"].dtype)})}


def derived(**given: Any) -> dict[str, Tensor]:
    """The float64 values of `chosen`, `total` and `output` that the written `logits` determine."""
    return {name: value.double() for name, value in _after(given, torch.float64).items()}


def control(**given: Any) -> dict[str, Tensor]:
    """`reference` with sums, products and the softmax in bfloat16."""
    logits = _logits(given, torch.bfloat16).to(given["logits"].dtype)
    found = _after(given | {"logits": logits}, torch.bfloat16)
    return {"logits": logits, **{name: found[name].to(given[name].dtype) for name in found}}


def _logits(given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    _, x = _normed_sum(given, dtype)
    router, bias = given["router_weight"], given["router_bias"]
    return _product(x, router, bias if bias.numel() else router.new_zeros(len(router)))


def _after(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    total, x = _normed_sum(given, dtype)
    logits, top_k = given["logits"], given["chosen"].shape[1]
    bits = logits.float().view(torch.int32)
    # ascending as whole numbers where the floats ascend: below 0, the larger the bits the smaller
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    chosen = torch.argsort(order, dim=1, descending=True, stable=True)[:, :top_k].sort(1).values
    gates = torch.softmax(logits.gather(1, chosen).to(dtype), 1)
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        u = _product(x[token], *_expert(given, "gate_up", expert))
        # fmin and fmax drop a NaN, as the engine's kernel does
        limit = torch.full_like(u[:, ::2], given["limit"])
        gate, up = torch.fmin(u[:, ::2], limit), torch.fmin(u[:, 1::2], limit)
        a = gate / (1 + torch.exp(-given["alpha"] * gate)) * (torch.fmax(up, -limit) + 1)
        y = _product(a, *_expert(given, "down", expert))
        total[token] += gates[token, choice].unsqueeze(1) * y
    output = _normed(total, given["next_weight"], given["epsilon"])
    return {"chosen": chosen.int(), "total": total, "output": output}


def _normed_sum(given: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    h = given["residual"].to(dtype) + given["input"].to(dtype)
    return h, _normed(h, given["weight"], given["epsilon"])


def _normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
    return rows * scale * weight.to(rows.dtype)


def _product(rows: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """bias + rows @ matrix.T; in bfloat16 each sum is rounded `PARTS` times."""
    if rows.dtype is torch.float64:
        return rows @ matrix.double().T + bias.double()
    sums = bias.to(rows.dtype).expand(len(rows), -1)
    for left, right in zip(rows.chunk(PARTS, 1), matrix.chunk(PARTS, 1), strict=True):
        sums = (sums.float() + left.float() @ right.float().T).to(rows.dtype)
    return sums


def _expert(given: dict[str, Any], matrix: str, expert: int) -> tuple[Tensor, Tensor]:
    bias = given[f"{matrix}_bias"][expert]
    packed = given[f"{matrix}_weights"][expert], given[f"{matrix}_scales"][expert]
    return dequantised(*packed, len(bias)), bias


def dequantised(weights: Tensor, scales: Tensor, columns: int) -> Tensor:
    """One expert's numbers, float32 [columns, depth], each from its place in Hopper's layout."""
    depth = weights.shape[1] // 2
    n = torch.arange(columns, device=weights.device, dtype=torch.int32).unsqueeze(1)
    k = torch.arange(depth, device=weights.device, dtype=torch.int32)
    word = k // 64 * 32 + n % 2 * 16 + k // 2 % 4 * 4 + k // 16 % 4
    at = (n // 16 * 4 + n % 8 // 2) * depth + 2 * word + k % 2
    half = weights.view(torch.int16).flatten()[at].int() & 0xFFFF
    i = k // 8 % 2 * 2 + n // 8 % 2
    code = torch.where(i < 3, half << 3 * i >> 6 & 7, half >> 9 & 6 | half >> 13 & 1)
    sign = torch.where(i < 3, half << 3 * i >> 15 & 1, half >> 14 & 1)
    number = torch.tensor(FP4, device=weights.device)[code] * (1 - 2 * sign)
    column = k // 64 * 64 + n // 128 % 2 * 32 + n % 8 * 4 + k // 32 % 2 * 2 + n // 8 % 2
    return number * torch.exp2(scales[n // 256 * 8 + n // 16 % 8, column].float() - 127)
