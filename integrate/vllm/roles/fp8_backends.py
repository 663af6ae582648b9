"""vLLM's kernels for fp8 with block scales whose weights stay as a checkpoint has them.

CUTLASS's and Triton's take them as they are. DeepGEMM's makes the scales powers of two; on Hopper
they stay float32, on Blackwell they are packed, which no patch takes. FlashInfer's, vLLM's first
choice on Hopper, is given x before it is quantised and leaves 32 rows and more to DeepGEMM's: a
patch quantises x as that one does, and leaves to it what it does not take.

The kernels of Marlin, Humming, B12x, AITER, XPUs and CPUs store weights in a layout of their own or
are for other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from patcher.integrate.vllm import sources

_FOLDER = "vllm.model_executor.kernels.linear.scaled_mm"
_BASE = f"{_FOLDER}.BlockScaledMMLinearKernel"
_CUTLASS, _TRITON = f"{_FOLDER}.cutlass", f"{_FOLDER}.triton"
_DEEP_GEMM, _FLASHINFER = f"{_FOLDER}.deep_gemm", f"{_FOLDER}.flashinfer"
_QUANTISER = "vllm.model_executor.layers.quantization.input_quant_fp8:QuantFP8"


@dataclass(frozen=True)
class Fp8Backend:
    """One class of kernel objects."""

    module: str
    kernel: str
    """The class, in that module."""
    engines_own: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """Its matmul with the tensors of `linear_fp8`, the last of them written."""


def _cutlass(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> None:
    columns = _by_columns(x_scale)
    torch.ops._C.cutlass_scaled_mm(out, x, weight.t(), columns, weight_scale.t(), None)


def _triton(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor) -> None:
    """It gives a tensor of its own, so this costs a copy."""
    run = sources.module(_TRITON)._w8a8_triton_block_scaled_mm_func
    block = x.shape[1] // x_scale.shape[1]
    out.copy_(run(x, weight, x_scale, weight_scale, [block, block], out.dtype))


def _deep_gemm(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor
) -> None:
    module = sources.module(_DEEP_GEMM)
    columns, powers = _by_columns(x_scale, 4), module.is_deep_gemm_e8m0_used()
    module._fp8_gemm_nt_op(x, columns, weight, weight_scale, out, powers)


def _by_columns(scale: Tensor, multiple: int = 1) -> Tensor:
    """The same scales column by column, at a pitch that is a multiple of so many, as DeepGEMM's
    copies by TMA want it."""
    pitch = -(-len(scale) // multiple) * multiple
    return scale.new_empty_strided(scale.shape, (1, pitch)).copy_(scale)


BACKENDS = (
    Fp8Backend(_CUTLASS, "CutlassFp8BlockScaledMMKernel", _cutlass),
    Fp8Backend(_TRITON, "TritonFp8BlockScaledMMKernel", _triton),
    Fp8Backend(_DEEP_GEMM, "DeepGemmFp8BlockScaledMMKernel", _deep_gemm),
    Fp8Backend(_FLASHINFER, "FlashInferFp8DeepGEMMDynamicBlockScaledKernel", _deep_gemm),
)
PARTS = (
    f"{_BASE}:FP8BlockParams.from_layer",
    f"{_BASE}:Fp8BlockScaledMMLinearKernel.__init__",
    f"{_BASE}:Fp8BlockScaledMMLinearKernel.process_weights_after_loading",
    f"{_BASE}:Fp8BlockScaledMMLinearKernel.apply_weights",
    f"{_BASE}:Fp8BlockScaledDynamicMMLinearKernel.__init__",
    f"{_CUTLASS}:CutlassFp8BlockScaledMMKernel.__init__",
    f"{_TRITON}:_w8a8_triton_block_scaled_mm_func",
    f"{_DEEP_GEMM}:DeepGemmFp8BlockScaledMMKernel.__init__",
    f"{_DEEP_GEMM}:DeepGemmFp8BlockScaledMMKernel.process_weights_after_loading",
    f"{_DEEP_GEMM}:_fp8_gemm_nt_op",
    f"{_FLASHINFER}:_dynamic_flashinfer_deepgemm_blockscale_gemm_impl",
    *(f"{one.module}:{one.kernel}.apply_block_scaled_mm" for one in BACKENDS),
    "vllm._custom_ops:cutlass_scaled_mm",
    f"{_QUANTISER}.__init__",
    f"{_QUANTISER}.forward_cuda",
)
"""What is replaced or relied on, by name."""
