# Op: sample_argmax: the index of each row's largest logit; of equal ones the smallest index, and
#   NaN is above infinity.
# Arguments: logits[T: tokens, vocab], output[I: tokens]; T: bfloat16 or float16 or float32; I:
#   int64
# Writes: output
# Needs: a GPU that Triton drives; vocab below 2^31, rows at any pitch; graph-safe; calls of one
#   shape on one stream at a time.
# Idea: a logit and its index are one whole number whose largest is the answer, ties and NaN
#   included. Some programs share a row, as many as fill the GPU; a second launch takes the largest
#   of their parts. Nothing was tuned.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: eb9bab916ffe86ece230a854dce8597309ab92c778b331c45b25074c623ac039

import torch
import triton
import triton.language as tl

BLOCK = 4096

_PARTS: dict[tuple, torch.Tensor] = {}


@triton.jit
def sample_argmax_part_kernel(logits_ptr, parts_ptr, pitch, vocab, each, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = part * each
    end = tl.minimum(begin + each, vocab)
    best = tl.full((BLOCK,), -(1 << 62), tl.int64)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * pitch + column, mask=column < end, other=0.0)
        # ascending as whole numbers where the floats ascend, -0 as 0, NaN on top
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        order = tl.where(bits < 0, -size, size)
        order = tl.where(size > 0x7F800000, 0x7FFFFFFF, order).to(tl.int64)
        # the smaller index first among equals
        order = (order << 31) + (0x7FFFFFFF - column)
        best = tl.where(column < end, tl.maximum(best, order), best)
    tl.store(parts_ptr + row * tl.num_programs(1) + part, tl.max(best, 0))


@triton.jit
def sample_argmax_kernel(parts_ptr, output_ptr, parts, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDE)
    best = tl.load(parts_ptr + row * parts + part, mask=part < parts, other=-(1 << 62))
    tl.store(output_ptr + row, 0x7FFFFFFF - (tl.max(best, 0) & 0x7FFFFFFF))


def sample_argmax(logits: torch.Tensor, output: torch.Tensor) -> None:
    tokens, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    each = triton.cdiv(blocks, min(blocks, max(256 // tokens, 1))) * BLOCK
    parts = triton.cdiv(vocab, each)
    key = (logits.device, tokens, parts)
    if logits.is_cuda:
        key += (torch.cuda.current_stream(logits.device).cuda_stream,)
    if key not in _PARTS:
        _PARTS[key] = output.new_empty(tokens * parts)
    sample_argmax_part_kernel[(tokens, parts)](
        logits, _PARTS[key], logits.stride(0), vocab, each, BLOCK=BLOCK, num_warps=8
    )
    sample_argmax_kernel[(tokens,)](
        _PARTS[key], output, parts, WIDE=triton.next_power_of_2(parts), num_warps=1
    )
