"""vLLM's experts in fp8 with block scales.

On Hopper without expert parallelism these are Triton's, or, if one asks for it, DeepGEMM's, which
leave weights and scales as a checkpoint has them. FlashInfer's experts have up before gate,
CUTLASS's take no blocks, and those of Marlin, Humming and TensorRT-LLM store weights in a layout of
their own. See `kernel_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from patcher.bench import load_op
from patcher.integrate.vllm.roles.kernel_experts import MOE, ROUTING, TRITON, KernelExperts, shown

_DEEP_GEMM = f"{MOE}.experts.triton_deep_gemm_moe:TritonOrDeepGemmExperts"


class Fp8Experts(KernelExperts):
    """Experts whose blocks of weights have one float32 scale each."""

    name: ClassVar[str] = "experts.fp8_block"
    op: ClassVar[str] = "moe_experts_fp8_block"
    # in the order that the fingerprints of bundles have
    parts: ClassVar[tuple[str, ...]] = (
        *(part for part in KernelExperts.parts if part not in ROUTING),
        f"{_DEEP_GEMM}.__init__",
        *ROUTING,
    )
    kinds: ClassVar[tuple[str, ...]] = TRITON, _DEEP_GEMM
    # fp8 rounds what is between the two matmuls by up to 1/16
    tolerance: ClassVar[float] = 0.08

    def constants(self, layer: Any) -> Mapping[str, Tensor]:
        held = layer.routed_experts
        scales = layer._quant_method.moe_kernel.fused_experts.quant_config
        found = {
            "w1": held.w13_weight,
            "w1_scale": scales.w1_scale,
            "w2": held.w2_weight,
            "w2_scale": scales.w2_scale,
        }
        return {name: tensor.data for name, tensor in found.items()}

    def layout(self, held: Any, scales: Any) -> str | None:
        """See `KernelExperts`."""
        block = scales.block_shape or (0, 1)
        given = held.w13_weight, scales.w1_scale, held.w2_weight, scales.w2_scale
        if block[0] != block[1] or block[0] % 32 or any(tensor is None for tensor in given):
            return "blocks that are no squares of a multiple of 32"
        if all(tensor.dim() == 3 and tensor.is_contiguous() for tensor in given):
            count, depth, wide = scales.w2_scale.shape
            hidden, inner = depth * block[0], wide * block[0]
            shapes = (2 * inner, hidden), (2 * wide, depth), (hidden, inner), (depth, wide)
            quantised, plain = torch.float8_e4m3fn, torch.float32
            dtypes = quantised, plain, quantised, plain
            if all(
                tensor.shape == (count, *shape) and tensor.dtype == dtype
                for tensor, shape, dtype in zip(given, shapes, dtypes, strict=True)
            ):
                return None
        return f"weights in another layout: {', '.join(map(shown, given))}"

    def weights(self, w1: Tensor, w2: Tensor, scales: Any) -> tuple[Tensor, ...]:
        """See `KernelExperts`."""
        return w1, scales.w1_scale, w2, scales.w2_scale

    def rows(self, given: Mapping[str, Tensor]) -> Tensor:
        """See `KernelExperts`. fp8 holds them exactly with the scale of any engine: the largest
        number of each block is 448 times a power of two."""
        weight = given["w1"]
        depth, hidden = given["w1_scale"].shape[2], weight.shape[2]
        steps = torch.linspace(448, -448, 32, device=weight.device).to(torch.float8_e4m3fn).float()
        block = torch.arange(hidden, device=weight.device) // (hidden // depth)
        row = steps.repeat(hidden // 32) * torch.exp2(-8.0 - block % 3)
        return torch.stack([row, -row.roll(5)])

    def expected(
        self, x: Tensor, given: Mapping[str, Tensor], gains: Tensor, ids: Tensor
    ) -> Tensor:
        """See `KernelExperts`: a sum over blocks of what lies between the matmuls."""
        (_, depth, wide), total = given["w2_scale"].shape, torch.zeros_like(x, dtype=torch.float64)
        block = x.shape[1] // depth
        halves = given["w1"].view(torch.uint8).chunk(2, 1)
        for number in range(wide):
            part = slice(number * block, (number + 1) * block)
            both = torch.cat([half[:, part] for half in halves], 1)
            total += load_op(self.op).reference(
                x=x,
                w1=both.view(given["w1"].dtype),
                w1_scale=given["w1_scale"][:, number::wide],
                w2=given["w2"][:, :, part],
                w2_scale=given["w2_scale"][:, :, number : number + 1],
                gains=gains,
                ids=ids,
                output=x,
            )["output"]
        return total

    def blocks(self, given: Mapping[str, Tensor]) -> int:
        """See `KernelExperts`."""
        return int(given["w2_scale"].shape[1])
