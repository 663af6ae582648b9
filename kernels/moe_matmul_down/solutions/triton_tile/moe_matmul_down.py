# Op: moe_matmul_down: output[row] = gate_scales[row] * (bias[e] + W[e] x[row]) for the expert e of
#   each row, W in MXFP4 as Hopper's layout has it; float32 sums, rounded once.
# Arguments: x[T: tokens * top_k, inner], weights[U: experts, hidden / 4, inner * 2], scales[U:
#   experts, (hidden + 255) // 256 * 8, inner], bias[B: experts, hidden], gate_scales[T: tokens *
#   top_k], row_map[I: tokens, top_k], histogram[I: experts], token_offsets[I: experts + 1],
#   tile_map[I: min(tokens * top_k, experts - 1 + (tokens * top_k - experts + 16) // 16)], output[T:
#   tokens * top_k, hidden]; T: bfloat16 or float32; U: uint8; B: float32; I: int32
# Writes: output
# Needs: a GPU that Triton drives; scales of any pitch, the rest contiguous; graph-safe.
# Idea: a program for each tile of 16 rows and 128 columns walks along k by 64, the period of the
#   layout; FP4 is decoded in registers by reshapes. Plain, not tuned.
# Made by: hand, as a plain right solution.
# Figures: not measured since scales have a pitch. Before, on an NVIDIA H200: sweep bf16 103.37x
#   against eager alone, for the proof of a patch point
#   (bench/results/vllm-points/h200-moe_matmul_down.json.xz); it is far slower than vLLM's kernel.
# Digest: b2b860ce49d921b9667c49af2c0df1395ca5e019d4cda3ef0f1f1460a4bbec88

"""moe_matmul_down(x[T: rows, inner], weights[U: experts, hidden / 4, 2 * inner],
scales[U: experts, 8 for each 256 of hidden, inner], bias[B: experts, hidden],
gate_scales[T: rows], row_map[I: tokens, top_k], histogram[I: experts],
token_offsets[I: experts + 1], tile_map[I: tiles], output[T: rows, hidden]).

One program for each tile of 16 rows and 128 columns; it walks along k in steps of 64, which is what
the layout of the weights repeats by.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def numbers(words_ptr, scales_ptr, first, columns, depth, pitch, begin, BLOCK: tl.constexpr):
    """FP4 numbers times their scales, float32 [BLOCK, 64]: BLOCK columns of one expert, 64 along k.

    Rows of words hold four of a column's neighbours each; what a word's place says of column and k
    becomes axes, which are put in order.
    """
    row = first // 4 + tl.arange(0, BLOCK // 4)
    place = begin // 2 + tl.arange(0, 32)
    at = row[:, None] * (depth // 2) + place[None, :]
    word = tl.load(words_ptr + at, mask=(row < columns // 4)[:, None], other=0)
    half = tl.join(word, word >> 16)
    last = ((half << 1) & 0x8000) | ((half >> 3) & 0x0180) | ((half >> 7) & 0x0040)
    bits = tl.join(tl.join(half, half << 3), tl.join(half << 6, last))
    # 16 columns, pair, odd column; pair along k, 16s along k; column's 8, odd k, k's 8
    bits = tl.reshape(bits, (BLOCK // 16, 4, 2, 4, 4, 2, 2, 2))
    bits = tl.reshape(tl.permute(bits, (0, 6, 1, 2, 4, 7, 3, 5)), (BLOCK, 64))
    code = (bits >> 6) & 7
    # four times the number: 0, 2, then 4, 6, doubled with each exponent
    size = tl.where(code < 2, code * 2, (2 + (code & 1)) << (code >> 1))
    value = tl.where((bits & 0x8000) != 0, -size, size).to(tl.float32) * 0.25

    n = (first + tl.arange(0, BLOCK))[:, None]
    step = tl.arange(0, 2)[None, :]
    column = begin + n // 128 % 2 * 32 + n % 8 * 4 + step * 2 + n // 8 % 2
    at = (n // 256 * 8 + n // 16 % 8) * pitch + column
    exponent = tl.load(scales_ptr + at, mask=n < columns, other=0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(scale[:, :, None], (BLOCK, 2, 32))
    return value * tl.reshape(scale, (BLOCK, 64))


@triton.jit
def moe_matmul_down_kernel(
    x_ptr, words_ptr, scales_ptr, bias_ptr, gates_ptr, histogram_ptr, offsets_ptr, tiles_ptr,
    output_ptr, columns, expert_words, expert_scales, pitch, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.load(tiles_ptr + tl.program_id(0))
    if tile >= 0:
        expert = (tile & 0xFFFF).to(tl.int64)
        row = (tile >> 16) * 16 + tl.arange(0, 16)
        real = row < tl.load(histogram_ptr + expert)
        row += tl.load(offsets_ptr + expert)
        first = tl.program_id(1) * BLOCK
        total = tl.zeros((16, BLOCK), tl.float32)
        for begin in range(0, DEPTH, 64):
            at = row[:, None] * DEPTH + begin + tl.arange(0, 64)[None, :]
            x = tl.load(x_ptr + at, mask=real[:, None], other=0.0)
            weight = numbers(
                words_ptr + expert * expert_words, scales_ptr + expert * expert_scales,
                first, columns, DEPTH, pitch, begin, BLOCK,
            )  # fmt: skip
            total = tl.dot(x, tl.trans(weight).to(x.dtype), total, input_precision="ieee")
        n = first + tl.arange(0, BLOCK)
        total += tl.load(bias_ptr + expert * columns + n, mask=n < columns, other=0.0)[None, :]
        gate = tl.load(gates_ptr + row, mask=real, other=0.0).to(tl.float32)
        value = total * gate[:, None]
        mask = real[:, None] & (n < columns)[None, :]
        at = row[:, None] * columns + n[None, :]
        tl.store(output_ptr + at, value.to(output_ptr.dtype.element_ty), mask=mask)


def moe_matmul_down(
    x: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    gate_scales: torch.Tensor,
    row_map: torch.Tensor,
    histogram: torch.Tensor,
    token_offsets: torch.Tensor,
    tile_map: torch.Tensor,
    output: torch.Tensor,
) -> None:
    depth, columns = x.shape[1], bias.shape[1]
    grid = tile_map.shape[0], triton.cdiv(columns, 128)
    moe_matmul_down_kernel[grid](
        x, weights.view(torch.int32), scales, bias, gate_scales, histogram, token_offsets,
        tile_map, output, columns, columns * depth // 8, scales.stride(0), scales.stride(1),
        DEPTH=depth, BLOCK=128, num_warps=4,
    )  # fmt: skip
