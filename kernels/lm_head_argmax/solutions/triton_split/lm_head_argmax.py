# Op: lm_head_argmax: the index of each token's largest logit, x times weight in float32, without
#   writing the logits; of equal ones the smallest index, and NaN is above infinity.
# Arguments: x[T: tokens, hidden], weight[T: vocab, hidden], output[I: tokens]; T: bfloat16 or
#   float16 or float32; I: int64
# Writes: output
# Needs: a GPU that Triton drives; tokens at most 128; contiguous tensors; graph-safe.
# Idea: one program has 32 or 64 rows of the weight and all tokens, so the weight is read once. A
#   logit and its index are one whole number whose largest is the answer, ties and NaN included; a
#   program writes that of its block for each token, and a second launch takes the largest of these.
#   Nothing was tuned.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 75eaa92b00a93134d601e1705331fbd7203100723db611f46e4b5b7acf782874

import torch
import triton
import triton.language as tl


@triton.jit
def lm_head_argmax_kernel(
    x_ptr, weight_ptr, parts_ptr, tokens, vocab, hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, hidden, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        left_at = x_ptr + row[:, None] * hidden + k[None, :]
        left = tl.load(left_at, mask=(row[:, None] < tokens) & (k[None, :] < hidden), other=0.0)
        right_at = weight_ptr + column[None, :].to(tl.int64) * hidden + k[:, None]
        right = tl.load(right_at, mask=(column[None, :] < vocab) & (k[:, None] < hidden), other=0.0)
        logits = tl.dot(left, right, logits, input_precision="ieee")
    # ascending as whole numbers where the floats ascend, -0 as 0, NaN on top
    bits = logits.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -size, size)
    order = tl.where(size > 0x7F800000, 0x7FFFFFFF, order).to(tl.int64)
    # the smaller index first among equals
    order = (order << 31) + (0x7FFFFFFF - column)[None, :]
    order = tl.where(column[None, :] < vocab, order, -(1 << 62))
    at = parts_ptr + tl.program_id(0).to(tl.int64) * tokens + row
    tl.store(at, tl.max(order, 1), mask=row < tokens)


@triton.jit
def lm_head_argmax_best_kernel(parts_ptr, output_ptr, tokens, parts, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    best = tl.full((BLOCK,), -(1 << 62), tl.int64)
    for begin in range(0, parts, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        at = parts_ptr + part.to(tl.int64) * tokens + token
        best = tl.maximum(best, tl.load(at, mask=part < parts, other=-(1 << 62)))
    tl.store(output_ptr + token, 0x7FFFFFFF - (tl.max(best, 0) & 0x7FFFFFFF))


def lm_head_argmax(x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
    tokens, hidden = x.shape
    vocab = len(weight)
    columns = 64 if vocab > 16384 else 32
    parts = triton.cdiv(vocab, columns)
    found = torch.empty((parts, tokens), dtype=torch.int64, device=x.device)
    lm_head_argmax_kernel[(parts,)](
        x, weight, found, tokens, vocab, hidden,
        ROWS=max(16, triton.next_power_of_2(tokens)), COLUMNS=columns,
        DEPTH=32 if x.dtype == torch.float32 else 128, num_warps=4, num_stages=3,
    )  # fmt: skip
    block = min(triton.next_power_of_2(parts), 1024)
    lm_head_argmax_best_kernel[(tokens,)](found, output, tokens, parts, BLOCK=block, num_warps=4)
