"""Baselines: TensorRT-LLM's kernel as flashinfer ships it, torch.compile, and eager.

A factory takes the device (`cpu` or `cuda`) and returns a callable. It raises ImportError with the
reason if the baseline does not run on this machine. A baseline writes in place or returns
(output,).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def _eager(
    rows: Tensor, row_map: Tensor, scales: Tensor, bias: Tensor, experts: Tensor, output: Tensor
) -> tuple[Tensor]:
    tokens, top_k = scales.shape
    chosen = rows[row_map.t().reshape(-1)].float().view(tokens, top_k, -1)
    if bias.shape[0]:
        chosen = chosen + bias[experts.view(-1)].float().view(tokens, top_k, -1)
    return ((chosen * scales.float().unsqueeze(-1)).sum(1).to(output.dtype),)


def eager(device: str) -> Baseline:
    return _eager


def compiled(device: str) -> Baseline:
    compiled: Baseline = torch.compile(_eager, dynamic=True)
    return compiled


_SOURCE = "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"
_PIECES = (
    r"template <class T, class U>\s*__host__ __device__ constexpr static U arrayConvert\(",
    r"template <typename OutputType, class GemmOutputType, class ScaleBiasType, ScaleMode \w+>"
    r"\s*__global__ void finalizeMoeRoutingKernel\(",
)
_AROUND = """
#include <cuda_bf16.h>
#include <algorithm>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

using cutlass::sizeof_bits;
enum class ScaleMode : int {{ NO_SCALE = 0, DEFAULT = 1 }};
constexpr static int FINALIZE_THREADS_PER_BLOCK = 256;

{pieces}

void finalize(tvm::ffi::TensorView rows, tvm::ffi::TensorView row_map, tvm::ffi::TensorView scales,
              tvm::ffi::TensorView bias, tvm::ffi::TensorView experts,
              tvm::ffi::TensorView output) {{
  using T = cutlass::bfloat16_t;
  const int64_t hidden = rows.size(1), top_k = scales.size(1);
  cudaLaunchConfig_t config = {{}};
  config.gridDim = dim3(scales.size(0));
  config.blockDim = dim3(FINALIZE_THREADS_PER_BLOCK);
  const DLDevice device = rows.device();
  config.stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const bool biased = bias.size(0) > 0;
  const cudaError_t status = cudaLaunchKernelEx(
      &config, finalizeMoeRoutingKernel<T, T, T, ScaleMode::DEFAULT>,
      static_cast<const T*>(rows.data_ptr()), static_cast<T*>(output.data_ptr()),
      biased ? static_cast<const T*>(bias.data_ptr()) : nullptr,
      static_cast<const float*>(scales.data_ptr()), static_cast<const int*>(row_map.data_ptr()),
      static_cast<const int*>(experts.data_ptr()), hidden, hidden, top_k,
      biased ? int(bias.size(0)) : (1 << 30), 0);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}}
"""


def finalize_source(text: str) -> str:
    """Source that launches only TensorRT-LLM's kernel, extracted from flashinfer's installed file.

    The kernel is not public there. It is launched as in finalizeMoeRoutingKernelLauncher: one block
    per token, 256 threads, programmatic dependent launch.

    Raises:
        ImportError: the file does not hold the kernel of flashinfer 0.6.13.
    """
    pieces = []
    for pattern in _PIECES:
        found = re.search(pattern + r".*?\n}\n", text, re.DOTALL)
        if found is None:
            raise ImportError("flashinfer's finalizeMoeRoutingKernel is not where it was in 0.6.13")
        pieces.append(found.group())
    return _AROUND.format(pieces="\n".join(pieces))


def flashinfer(device: str) -> Baseline:
    if device != "cuda":
        raise ImportError("TensorRT-LLM's kernel needs a CUDA device")
    import tvm_ffi.cpp
    from flashinfer.jit import env

    text = (Path(env.FLASHINFER_CSRC_DIR) / _SOURCE).read_text(encoding="utf-8")
    module = tvm_ffi.cpp.load_inline(
        name="trtllm_moe_finalize",
        cuda_sources=finalize_source(text),
        functions=["finalize"],
        extra_cuda_cflags=["--expt-relaxed-constexpr"],
        extra_include_paths=[str(path) for path in env.CUTLASS_INCLUDE_DIRS],
    )

    def run(*tensors: Tensor) -> None:
        if tensors[0].dtype is not torch.bfloat16:
            raise ImportError("built for bfloat16 alone")
        module.finalize(*tensors)

    return run


BASELINES: dict[str, Callable[[str], Baseline]] = {
    "flashinfer": flashinfer,
    "torch.compile": compiled,
    "eager": eager,
}
ACCURACY_BASELINE = "eager"
"""The baseline whose error against float64 is the yardstick of a candidate's error."""
