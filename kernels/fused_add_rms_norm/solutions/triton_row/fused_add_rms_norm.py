# Op: fused_add_rms_norm: residual += input; input = residual / sqrt(mean(residual^2) + epsilon) *
#   weight, in place; arithmetic in float32.
# Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden], epsilon; T:
#   bfloat16 or float16 or float32; W: T or float32
# Writes: input, residual
# Needs: a GPU that Triton drives; contiguous tensors, a row in one program's registers; graph-safe.
# Idea: one program a row; the row stays in registers between the sum of squares and the scaling, so
#   each element is read and written once. Slower than flashinfer's kernel where that takes the
#   dtypes.
# Made by: hand.
# Figures: NVIDIA H200, geometric means, bench/results/h200-transformers: sweep bf16 0.96x against
#   flashinfer, 0.94x to 0.98x at tokens 1 to 128 (evaluate-triton_row-bf16.json.xz); sweep
#   bf16-fp32-weight 1.40x against torch.compile, 1.21x to 1.52x at tokens 1 to 128
#   (evaluate-triton_row-bf16-fp32-weight.json.xz).
# Digest: cb9abb71d1ca8cec12f926c999d0d1fa95447a9c3012026cfc6222161f088c18

"""fused_add_rms_norm(input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden],
epsilon), in place.

One program a row; the row stays in registers between the sum of squares and the scaling. float32
arithmetic.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def fused_add_rms_norm_kernel(
    input_ptr, residual_ptr, weight_ptr, hidden, epsilon, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    at = row * hidden + column
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(residual_ptr + at, total, mask=mask)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / hidden + epsilon)
    tl.store(input_ptr + at, total * scale * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    block = triton.next_power_of_2(hidden)
    warps = min(max(block // 512, 1), 16)
    fused_add_rms_norm_kernel[(tokens,)](
        input, residual, weight, hidden, epsilon, BLOCK=block, num_warps=warps
    )
