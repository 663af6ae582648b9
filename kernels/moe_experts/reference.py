"""moe_experts in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    x: Tensor, gate_up: Tensor, down: Tensor, gains: Tensor, ids: Tensor, output: Tensor
) -> dict[str, Tensor]:
    """The float64 values of `output`, [tokens, hidden] as x; gate_up is [experts, 2 * inner,
    hidden], down [experts, hidden, inner]; gains and ids are [tokens, top_k]; an id that is no
    expert adds nothing.
    """
    wide = x.double()
    found = torch.zeros_like(wide)
    for expert in range(len(down)):
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (wide[rows] @ gate_up[expert].double().T).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up * gains[rows, choice].double().unsqueeze(1)
        found.index_add_(0, rows, inner @ down[expert].double().T)
    return {"output": found}


def control(x: Tensor, output: Tensor, **given: Tensor) -> dict[str, Tensor]:
    """`reference` with x and output in an fp8."""
    found = reference(x.to(torch.float8_e4m3fn), output=output, **given)["output"]
    return {"output": found.clamp(-448, 448).to(torch.float8_e4m3fn).to(output.dtype)}
