"""moe_experts_fp8_block in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    x: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    gains: Tensor,
    ids: Tensor,
    output: Tensor,
) -> dict[str, Tensor]:
    """The float64 values of `output`, [tokens, hidden] as x; w1 is [experts, 2 * inner, hidden], w2
    [experts, hidden, inner], both in fp8 with a scale a block; gains and ids are [tokens, top_k];
    an id below zero adds nothing.
    """
    block, wide = x.shape[1] // w1_scale.shape[2], x.double()
    found = torch.zeros_like(wide)
    for expert in ids[ids >= 0].unique().tolist():
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        first, second = (
            weight[expert].double()
            * scale[expert].double().repeat_interleave(block, 0).repeat_interleave(block, 1)
            for weight, scale in ((w1, w1_scale), (w2, w2_scale))
        )
        gate, up = (wide[rows] @ first.T).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up * gains[rows, choice].double().unsqueeze(1)
        found.index_add_(0, rows, inner @ second.T)
    return {"output": found}


def control(x: Tensor, output: Tensor, **given: Tensor) -> dict[str, Tensor]:
    """`reference` with x and output in an fp8 of a bit of the mantissa fewer."""
    found = reference(x.to(torch.float8_e5m2), output=output, **given)["output"]
    return {"output": found.to(torch.float8_e5m2).to(output.dtype)}
