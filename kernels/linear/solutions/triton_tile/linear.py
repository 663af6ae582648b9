# Op: linear: output[t, n] = bias[n] + sum over k of x[t, k] * weight[n, k], an empty bias adding
#   nothing; sums and products in float32, rounded once.
# Arguments: x[T: tokens, inner], weight[T: outer, inner], bias[T: biased * outer], output[T:
#   tokens, outer]; T: bfloat16 or float16 or float32
# Writes: output
# Needs: a GPU that Triton drives; tokens at most 64; contiguous tensors; graph-safe.
# Idea: one program has 16 or 32 outputs for all tokens, so the weight is read once; tl.dot with a
#   float32 accumulator, four stages of loads. Nothing was tuned beyond the tile.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 40a81d804178591bc311ed86e8ce3d139f51b4dc5e22a879ed378395ec78ccb2

import torch
import triton
import triton.language as tl


@triton.jit
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, output_ptr, tokens, outer, inner,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, inner, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        left_at = x_ptr + row[:, None] * inner + k[None, :]
        left = tl.load(left_at, mask=(row[:, None] < tokens) & (k[None, :] < inner), other=0.0)
        right_at = weight_ptr + column[None, :].to(tl.int64) * inner + k[:, None]
        right = tl.load(right_at, mask=(column[None, :] < outer) & (k[:, None] < inner), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if BIASED:
        bias = tl.load(bias_ptr + column, mask=column < outer, other=0.0)
        total += bias.to(tl.float32)[None, :]
    at = output_ptr + row[:, None] * outer + column[None, :]
    inside = (row[:, None] < tokens) & (column[None, :] < outer)
    tl.store(at, total.to(output_ptr.dtype.element_ty), mask=inside)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, output: torch.Tensor) -> None:
    tokens, inner = x.shape
    outer = len(weight)
    columns = 32 if outer > 2048 else 16
    linear_kernel[(triton.cdiv(outer, columns),)](
        x, weight, bias, output, tokens, outer, inner,
        BIASED=bias.numel() > 0, ROWS=max(16, triton.next_power_of_2(tokens)), COLUMNS=columns,
        DEPTH=64 if x.dtype == torch.float32 else 256, num_warps=4, num_stages=4,
    )  # fmt: skip
