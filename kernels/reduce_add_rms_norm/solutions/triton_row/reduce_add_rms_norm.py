"""reduce_add_rms_norm(rows[T: expert_rows, hidden], row_map[I: tokens, top_k],
residual[T: tokens, hidden], weight[W: hidden], output[T: tokens, hidden], epsilon).

One program a token; the row stays in float32 registers from the first of its experts to the norm.
"""

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
