"""Doubles of kernels for quantised weights, for whole models; see `vllm_gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_experts import matmul_ogs, routed_here
from vllm_fp8 import ExpertsGpu, Gpu, chooses, quantised
from vllm_sample import EXPERTS, swizzled

from patcher.integrate.vllm import sources
from patcher.integrate.vllm.points import POINTS

_MOE = "vllm.model_executor.layers.fused_moe"
_REPLACED = (
    "router.oai",
    "experts.sum.oai",
    "experts.gate_up.mxfp4",
    "experts.down.mxfp4",
    "experts_to_norm",
    "add_norm_route",
    "moe_block",
)
"""The points whose place is a function of Triton's library, for which there is a double."""


def mxfp4(patch: pytest.MonkeyPatch) -> None:
    """Experts by the kernels of OpenAI in Triton, with weights as a Hopper GPU has them."""
    experts, oracle = sources.module(EXPERTS), sources.module(f"{_MOE}.oracle.mxfp4")

    def swizzle(bits: torch.Tensor, scales: torch.Tensor, num_warps: int = 8) -> Any:
        weight, scale, weight.numbers = swizzled(bits, scales, num_warps)
        return weight, sources.part("triton_kernels.numerics:InFlexData")(), scale

    flags = sources.part("triton_kernels.matmul_ogs_details.opt_flags:make_opt_flags").__globals__
    patch.setitem(flags["_opt_flags_constraints"], "split_k", 1)
    patch.setattr(experts, "_triton_kernel_moe_supports_current_device", lambda: True)
    patch.setattr(experts, "matmul_ogs", matmul_ogs)
    patch.setattr(oracle, "_swizzle_mxfp4", swizzle)
    for name in _REPLACED:  # that the place is vLLM's own is for other tests to say
        patch.setattr(POINTS[name], "find", lambda self: "")
    routed_here(patch)


def fp8(patch: pytest.MonkeyPatch) -> None:
    """Linear layers and experts by Triton's kernels for blocks of 32."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    backend = sources.part(f"{_MOE}.oracle.fp8:Fp8MoeBackend").TRITON
    experts = sources.part(f"{_MOE}.experts.triton_moe:TritonExperts")
    patch.setattr(CustomOp, "maybe_compile", lambda self, fn, **more: fn)
    patch.setattr(fp8, "init_fp8_linear_kernel", chooses("triton"))
    patch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (backend, experts))
    patch.setattr(fp8_utils, "per_token_group_quant_fp8", quantised)
    patch.setattr(fp8_utils, "w8a8_triton_block_scaled_mm", Gpu().triton)
    ExpertsGpu().put_in(patch)
