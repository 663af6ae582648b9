# Op: reduce_add_rms_norm: residual[t] += sum over k of rows[row_map[t, k]] (-1: skipped); output[t]
#   = residual[t] / sqrt(mean(residual[t]^2) + epsilon) * weight; float32, nothing rounded in
#   between.
# Arguments: rows[T: tokens * top_k + spare, hidden], row_map[I: tokens, top_k], residual[T: tokens,
#   hidden], weight[W: hidden], output[T: tokens, hidden], epsilon; T: bfloat16 or float16 or
#   float32; W: T or float32; I: int32
# Writes: residual, output
# Needs: a GPU that Triton drives; contiguous tensors; graph-safe.
# Idea: one program a token; the row stays in float32 registers from the first of its experts to the
#   norm, so nothing is stored and read again in between.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 12d4861c64ebfb71911848721ee9a50fe34f90bc0ef4a30fc9a8cf7b719a0ff4

import torch
import triton
import triton.language as tl


@triton.jit
def reduce_add_rms_norm_kernel(
    rows_ptr, map_ptr, residual_ptr, weight_ptr, output_ptr, hidden, epsilon,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    at = token * hidden + column
    total = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(map_ptr + token * TOP_K + k).to(tl.int64)
        term = tl.load(rows_ptr + row * hidden + column, mask=inside & (row >= 0), other=0.0)
        total += term.to(tl.float32)
    tl.store(residual_ptr + at, total.to(residual_ptr.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / hidden + epsilon)
    normed = total * scale * weight
    tl.store(output_ptr + at, normed.to(output_ptr.dtype.element_ty), mask=inside)


def reduce_add_rms_norm(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    epsilon: float,
) -> None:
    tokens, top_k = row_map.shape
    hidden = output.shape[1]
    block = triton.next_power_of_2(hidden)
    reduce_add_rms_norm_kernel[(tokens,)](
        rows, row_map, residual, weight, output, hidden, epsilon,
        TOP_K=top_k, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
