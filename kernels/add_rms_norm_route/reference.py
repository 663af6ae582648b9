"""add_rms_norm_route in plain PyTorch: reference, what follows from the logits, and control."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROUTE = runpy.run_path(str(Path(__file__).parent.parent / "moe_route" / "reference.py"))

_TABLES = (
    *("gate_scales", "gather_index", "scatter_index", "histogram", "token_offsets"),
    *("tile_offsets", "tile_map"),
)
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
    tables: dict[str, Tensor] = _ROUTE["reference"](
        logits, **{name: others[name] for name in _TABLES}
    )
    return tables


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
    return found | _ROUTE["control"](found["logits"], **tables)
