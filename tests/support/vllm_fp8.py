"""Linear layers in fp8 of the real vLLM's Python, with a double for each CUDA kernel of theirs.

The doubles compute in PyTorch what the kernels are documented to, from the layouts that they want.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_gpu import routed
from vllm_here import config

__all__ = ("config",)  # a fixture of tests that have `gpu`

OUTER, INNER, BLOCK = 80, 96, 32
BACKENDS = {
    "cutlass": "CutlassFp8BlockScaledMMKernel",
    "triton": "TritonFp8BlockScaledMMKernel",
    "deep_gemm": "DeepGemmFp8BlockScaledMMKernel",
    "flashinfer": "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
}


def matmul(x: Any, x_scale: Any, weight: Any, weight_scale: Any) -> torch.Tensor:
    right = weight_scale.repeat_interleave(BLOCK, 0)[: len(weight)].repeat_interleave(BLOCK, 1)
    left = x.float() * x_scale.repeat_interleave(BLOCK, 1)
    result: torch.Tensor = (left @ (weight.float() * right).T).bfloat16()
    return result


def wide(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def quantised(x: torch.Tensor, *_: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of vLLM's quantisation."""
    parts = x.float().view(len(x), -1, BLOCK)
    scale = parts.abs().amax(2).clamp_min(1e-10) / 448
    return (parts / scale.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn), scale


class ExpertsGpu:
    """In the place of vLLM's Triton matmul, which DeepGEMM's experts leave few rows to."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        """Of each call of the experts."""
        self.change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
        """What a kernel of another kind does to the scales of a weight."""

    def triton(
        self,
        a: Any,
        b: Any,
        c: Any,
        a_scale: Any,
        b_scale: Any,
        gains: Any,
        *rest: Any,
        **more: Any,
    ) -> None:
        _, ids, _, weighted, top_k = rest[:5]
        assert more["block_shape"] == [BLOCK, BLOCK]
        rows = c.view(len(ids), -1)
        if top_k > 1:
            self.rows.append(len(a))
        for gate, expert in enumerate(ids.tolist()):
            if expert < 0:
                rows[gate] = torch.nan  # what nobody wrote
                continue
            x = a[gate // top_k].float() * a_scale[gate // top_k].repeat_interleave(BLOCK)
            found = wide(b[expert], self.change(b_scale[expert])) @ x
            rows[gate] = found * gains.flatten()[gate] if weighted else found

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        """Put all doubles in; what is patched holds `library`, which has an operator."""
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.experts import triton_moe
        from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep

        def assigned(ids: torch.Tensor, *_: Any, **more: Any) -> tuple[None, torch.Tensor, None]:
            return None, ids.flatten(), None

        def silu_and_mul(result: torch.Tensor, given: torch.Tensor) -> None:
            gate, up = given.chunk(2, 1)
            result.copy_(torch.nn.functional.silu(gate) * up)

        for module in (triton_moe, no_dp_ep):
            patch.setattr(module, "moe_kernel_quantize_input", quantised)
        patch.setattr(triton_moe, "invoke_fused_moe_triton_kernel", self.triton)
        patch.setattr(triton_moe, "tl", SimpleNamespace(bfloat16=None))
        patch.setattr(triton_moe, "try_get_optimal_moe_config", lambda *_, **more: {})
        patch.setattr(triton_moe, "_prepare_expert_assignment", assigned)
        patch.setattr(_custom_ops, "topk_softmax", routed)
        patch.setattr(_custom_ops, "moe_sum", lambda rows, out, *_: out.copy_(rows.sum(1)))
        self.library: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
        self.library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
        self.library.impl("silu_and_mul", silu_and_mul, "CPU")


class Gpu:
    """In the place of the kernels of CUTLASS, Triton, DeepGEMM and FlashInfer."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        """Of x in each call."""
        self.factor = 1.0
        """By which a kernel of another kind differs."""

    def multiply(self, x: Any, x_scale: Any, weight: Any, weight_scale: Any) -> torch.Tensor:
        self.rows.append(len(x))
        return matmul(x, x_scale, weight, weight_scale) * self.factor

    def cutlass(self, out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any) -> None:
        assert a_scales.stride() == (1, len(a)), "CUTLASS's kernel wants columns"
        out.copy_(self.multiply(a, a_scales, b.t(), b_scales.t()))

    def triton(self, *given: Any) -> torch.Tensor:
        x, weight, x_scale, weight_scale, block, dtype = given
        assert (list(block), dtype) == ([BLOCK, BLOCK], torch.bfloat16)
        assert x_scale.is_contiguous()
        return self.multiply(x, x_scale, weight, weight_scale)

    def deep_gemm(self, left: Any, right: Any, out: Any, **more: Any) -> None:
        rows = len(left[0])  # PyTorch's quantisation does not pad columns, the kernel's does
        assert left[1].stride() in ((1, rows), (1, -(-rows // 4) * 4))
        out.copy_(self.multiply(*left, *right))

    def flashinfer(
        self, x: torch.Tensor, weight: Any, scale: Any, block: int, powers: bool
    ) -> torch.Tensor:
        """As vLLM's operator, which leaves many rows to DeepGEMM."""
        from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
        from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

        if len(x) >= 32:
            quantise = QuantFP8(False, GroupShape(1, block), use_ue8m0=powers)
            quantised, x_scale = quantise.forward_native(x)
            return self.multiply(quantised, x_scale, weight, scale)
        self.rows.append(len(x))
        ones = torch.ones(len(x), INNER // BLOCK)
        return matmul(x, ones, weight, scale)  # its own quantisation is finer here


@pytest.fixture
def gpu(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    made = Gpu()
    # vLLM compiles what stands for the quantisation's CUDA kernel
    monkeypatch.setattr(CustomOp, "maybe_compile", lambda self, fn, **more: fn)
    library: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
        "Tensor? bias) -> ()"
    )
    library.impl("cutlass_scaled_mm", made.cutlass, "CPU")
    monkeypatch.setattr(fp8_utils, "w8a8_triton_block_scaled_mm", made.triton)
    monkeypatch.setattr(deep_gemm, "fp8_gemm_nt", made.deep_gemm)
    name = "dynamic_flashinfer_deepgemm_blockscale_gemm"
    monkeypatch.setattr(torch.ops.vllm, name, made.flashinfer, raising=False)
    monkeypatch.setattr(config, "model_config", SimpleNamespace(dtype=torch.bfloat16))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield made
    torch.set_default_dtype(before)
    library._destroy()


def chooses(backend: str) -> Any:
    """In the place of vLLM's choice of a kernel, which asks for a GPU."""
    from vllm.model_executor.kernels.linear import scaled_mm
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        FP8ScaledMMLinearLayerConfig as Settings,
    )

    def chosen(module_name: str = "", **settings: Any) -> Any:
        module = __import__(f"{scaled_mm.__name__}.{backend}", fromlist=["_"])
        return getattr(module, BACKENDS[backend])(Settings(**settings))

    return chosen


def layer_of(backend: str, bias: bool = False, block: tuple[int, int] = (BLOCK, BLOCK)) -> Any:
    """As vLLM builds and loads it, with a backend that it would choose on a GPU."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import fp8

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "init_fp8_linear_kernel", chooses(backend))
        quantised = fp8.Fp8Config(True, "dynamic", weight_block_size=list(block))
        layer = ReplicatedLinear(INNER, OUTER, bias=bias, quant_config=quantised, return_bias=False)
    seed = torch.Generator().manual_seed(len(backend))
    for name, parameter in layer.named_parameters():
        numbers = torch.rand(parameter.shape, generator=seed, dtype=torch.float32)
        shifted = numbers + 0.5 if "scale" in name else 2 * numbers - 1
        parameter.data.copy_(shifted.to(parameter.dtype))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, INNER, generator=torch.Generator().manual_seed(count)).bfloat16()
