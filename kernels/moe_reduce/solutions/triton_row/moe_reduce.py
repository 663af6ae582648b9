"""moe_reduce(rows[X: splits, expert_rows, hidden], row_map[I: tokens, top_k],
scales[S: tokens or 0, top_k], output[T: tokens, hidden]).

A program for each token and block of columns; the sum stays in float32 registers.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def moe_reduce_kernel(
    rows_ptr, map_ptr, scales_ptr, output_ptr, hidden, split_stride, row_stride,
    SPLITS: tl.constexpr, TOP_K: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(map_ptr + token * TOP_K + k).to(tl.int64)
        term = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            at = rows_ptr + split * split_stride + row * row_stride + column
            term += tl.load(at, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if SCALED:
            scale = tl.load(scales_ptr + token * TOP_K + k).to(tl.float32)
            term = tl.where(row >= 0, term * scale, 0.0)
        total += term
    at = output_ptr + token.to(tl.int64) * hidden + column
    tl.store(at, total.to(output_ptr.dtype.element_ty), mask=inside)


def moe_reduce(
    rows: torch.Tensor, row_map: torch.Tensor, scales: torch.Tensor, output: torch.Tensor
) -> None:
    tokens, top_k = row_map.shape
    hidden = output.shape[1]
    block = min(triton.next_power_of_2(hidden), 512)
    moe_reduce_kernel[(tokens, triton.cdiv(hidden, block))](
        rows, row_map, scales, output, hidden, rows.stride(0), rows.stride(1),
        SPLITS=rows.shape[0], TOP_K=top_k, SCALED=scales.shape[0] > 0, BLOCK=block, num_warps=4,
    )  # fmt: skip
