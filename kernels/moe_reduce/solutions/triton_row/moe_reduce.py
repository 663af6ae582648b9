# Op: moe_reduce: output[t] = sum over k of scales[t, k] * sum over s of rows[s, row_map[t, k]],
#   entries of -1 skipped, scales 1 where there are none; float32, rounded once.
# Arguments: rows[X: splits, tokens * top_k + spare, hidden], row_map[I: tokens, top_k], scales[S:
#   scaled * tokens, top_k], output[T: tokens, hidden]; T: bfloat16 or float16 or float32; X: T or
#   float32; S: float32 or T; I: int32
# Writes: output
# Needs: a GPU that Triton drives; elements of a row adjacent, any stride of rows; graph-safe.
# Idea: a program for each token and 512 columns; the sum over choices and splits stays in float32
#   registers, so rows are read once.
# Made by: hand, as a plain right solution.
# Figures: not measured by itself; it ran in vLLM in place of vLLM's own:
#   bench/results/vllm-points/README.md.
# Digest: 41dd9798706e4b033cfccf0535c3124b0754679a7d5d45bba3b305b63be1b625

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
