# Op: rms_norm_quant_fp8: x = input / sqrt(mean(input^2) + epsilon) * weight; scales[t, g] = the
#   largest absolute x of the g-th group of row t over 448, of at least 1 / (448 * 512); output = x
#   over its group's scale, rounded to the nearest fp8; float32.
# Arguments: input[T: tokens, groups * group], weight[W: groups * group], output[Q: tokens, groups *
#   group], scales[F: tokens, groups], epsilon; T: bfloat16 or float16 or float32; W: T or float32;
#   Q: float8_e4m3fn; F: float32
# Writes: output, scales
# Needs: a GPU of capability 8.9 or above that Triton drives; rows of the input at any pitch;
#   graph-safe.
# Idea: a program has some groups of one row, about 1,024 numbers, so that few rows spread over the
#   GPU; each sums the squares of the whole row.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: bc2c69163ff0d88db60a41d26de98b492f387208d3207a59ab43e86e510356d8

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_quant_fp8_kernel(
    input_ptr, weight_ptr, output_ptr, scales_ptr, pitch, groups, size, epsilon,
    GROUPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    hidden = groups * size
    input_ptr += row * pitch
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, hidden, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        part = tl.load(input_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
        squares += part * part
    factor = tl.rsqrt(tl.sum(squares, axis=0) / hidden + epsilon)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, WIDE)
    at = group[:, None] * size + lane[None, :]
    inside = (group[:, None] < groups) & (lane[None, :] < size)
    x = tl.load(input_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = x * factor * tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1.0 / (448.0 * 512.0))
    numbers = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0)
    numbers = numbers.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * hidden + at, numbers, mask=inside)
    tl.store(scales_ptr + row * groups + group, scale, mask=group < groups)


def rms_norm_quant_fp8(
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    scales: torch.Tensor,
    epsilon: float,
) -> None:
    tokens, groups = scales.shape
    size = input.shape[1] // groups
    wide = triton.next_power_of_2(size)
    some = min(max(1024 // wide, 1), triton.next_power_of_2(groups))
    rms_norm_quant_fp8_kernel[(tokens, triton.cdiv(groups, some))](
        input, weight, output, scales, input.stride(0), groups, size, epsilon,
        GROUPS=some, WIDE=wide, BLOCK=4096, num_warps=16 if wide > 4096 else 4,
    )  # fmt: skip
