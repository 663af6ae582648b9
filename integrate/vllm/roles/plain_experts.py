"""vLLM's experts whose weights are not quantised, by Triton: the default on Hopper.

FlashInfer's experts have up before gate, and those of TensorRT-LLM, AITER and MoonEP store weights
in a layout of their own. See `kernel_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from patcher.bench import load_op
from patcher.integrate.vllm.roles.kernel_experts import TRITON, KernelExperts, shown

_AT_ONCE = 512
"""Columns between the matmuls that a trial computes at once."""
_BLOCKS = 8


class PlainExperts(KernelExperts):
    """Experts with weights in the dtype of their rows."""

    name: ClassVar[str] = "experts.plain"
    op: ClassVar[str] = "moe_experts"
    kinds: ClassVar[tuple[str, ...]] = (TRITON,)
    # vLLM rounds rows and what is between the matmuls to bfloat16
    tolerance: ClassVar[float] = 0.02

    def constants(self, layer: Any) -> Mapping[str, Tensor]:
        held = layer.routed_experts
        return {"gate_up": held.w13_weight.data, "down": held.w2_weight.data}

    def layout(self, held: Any, scales: Any) -> str | None:
        """See `KernelExperts`."""
        gate_up, down = given = held.w13_weight, held.w2_weight
        if scales.quant_dtype is not None or scales.w1_scale is not None:
            return "quantised weights"
        if all(tensor.dim() == 3 and tensor.is_contiguous() for tensor in given):
            count, hidden, inner = down.shape
            dtypes = {gate_up.dtype, down.dtype, held.moe_config.in_dtype}
            if gate_up.shape == (count, 2 * inner, hidden) and len(dtypes) == 1:
                return None
        return f"weights in another layout: {', '.join(map(shown, given))}"

    def weights(self, w1: Tensor, w2: Tensor, scales: Any) -> tuple[Tensor, ...]:
        """See `KernelExperts`."""
        return w1, w2

    def rows(self, given: Mapping[str, Tensor]) -> Tensor:
        """See `KernelExperts`."""
        hidden, device = given["gate_up"].shape[2], given["gate_up"].device
        row = torch.linspace(-1.0, 2.0, hidden, device=device)
        return torch.stack([row, row.flip(0)])

    def expected(
        self, x: Tensor, given: Mapping[str, Tensor], gains: Tensor, ids: Tensor
    ) -> Tensor:
        """See `KernelExperts`."""
        total = torch.zeros_like(x, dtype=torch.float64)
        gate, up = given["gate_up"].chunk(2, 1)
        for start in range(0, gate.shape[1], _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            total += load_op(self.op).reference(
                x=x,
                gate_up=torch.cat([gate[:, part], up[:, part]], 1),
                down=given["down"][:, :, part],
                gains=gains,
                ids=ids,
                output=x,
            )["output"]
        return total

    def blocks(self, given: Mapping[str, Tensor]) -> int:
        """See `KernelExperts`."""
        return _BLOCKS if given["down"].shape[1] % _BLOCKS == 0 else 1
