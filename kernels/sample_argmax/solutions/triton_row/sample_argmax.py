# Op: sample_argmax: the index of each row's largest logit; of equal ones the smallest index, and
#   NaN is above infinity.
# Arguments: logits[T: tokens, vocab], output[I: tokens]; T: bfloat16 or float16 or float32; I:
#   int64
# Writes: output
# Needs: a GPU that Triton drives; any size, rows at any pitch; graph-safe.
# Idea: one program a row. A logit and its index are one whole number whose largest is the answer,
#   ties and NaN included.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: d460bdbebebed3402d60116bf641de696720a7778a94652d5fabd27c6830bf97

import torch
import triton
import triton.language as tl


@triton.jit
def sample_argmax_kernel(logits_ptr, output_ptr, pitch, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), -(1 << 62), tl.int64)
    for begin in range(0, vocab, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * pitch + column, mask=column < vocab, other=0.0)
        # ascending as whole numbers where the floats ascend, -0 as 0, NaN on top
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        order = tl.where(bits < 0, -size, size)
        order = tl.where(size > 0x7F800000, 0x7FFFFFFF, order).to(tl.int64)
        # the smaller index first among equals
        order = (order << 31) + (0x7FFFFFFF - column)
        best = tl.where(column < vocab, tl.maximum(best, order), best)
    tl.store(output_ptr + row, 0x7FFFFFFF - (tl.max(best, 0) & 0x7FFFFFFF))


def sample_argmax(logits: torch.Tensor, output: torch.Tensor) -> None:
    tokens, vocab = logits.shape
    block = min(triton.next_power_of_2(vocab), 8192)
    sample_argmax_kernel[(tokens,)](
        logits, output, logits.stride(0), vocab,
        BLOCK=block, num_warps=min(max(block // 256, 1), 32),
    )  # fmt: skip
