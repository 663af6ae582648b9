# Op: gelu_and_mul: output = gate / 2 * (1 + erf(gate / sqrt(2))) * up; arithmetic in float32.
# Arguments: gate[T: tokens, intermediate], up[T: tokens, intermediate], output[T: tokens,
#   intermediate]; T: bfloat16 or float16 or float32
# Writes: output
# Needs: a GPU that Triton drives; any size; rows of gate and up at any pitch; graph-safe.
# Idea: a program has 1,024 columns of one row, so that few rows spread over the GPU.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 0d8b3b608c910e5676a337e56715415b851ba4247a35a1ac30cb754acd6579ca

import torch
import triton
import triton.language as tl


@triton.jit
def gelu_and_mul_kernel(
    gate_ptr, up_ptr, output_ptr, gate_pitch, up_pitch, wide, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < wide
    x = tl.load(gate_ptr + row * gate_pitch + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_pitch + column, mask=inside, other=0.0).to(tl.float32)
    x = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    value = (x * up).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * wide + column, value, mask=inside)


def gelu_and_mul(gate: torch.Tensor, up: torch.Tensor, output: torch.Tensor) -> None:
    tokens, wide = gate.shape
    gelu_and_mul_kernel[(tokens, triton.cdiv(wide, 1024))](
        gate, up, output, gate.stride(0), up.stride(0), wide, BLOCK=1024, num_warps=4
    )
