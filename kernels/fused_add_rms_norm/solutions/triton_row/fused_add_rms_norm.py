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
