# Op: rms_norm: output = input / sqrt(mean(input^2) + epsilon) * weight for each row; arithmetic in
#   float32.
# Arguments: input[T: tokens, hidden], weight[W: hidden], output[T: tokens, hidden], epsilon; T:
#   bfloat16 or float16 or float32; W: T or float32
# Writes: output
# Needs: a GPU that Triton drives; rows of the input at any pitch, a row in one program's registers;
#   graph-safe.
# Idea: one program a row, which stays in registers from its sum of squares to its scaling.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 7065d57f1c4e3c73682381207bcf67ea41e22040c0e7e9f347c817e75c2c43de

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(input_ptr, weight_ptr, output_ptr, pitch, hidden, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(input_ptr + row * pitch + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + epsilon)
    value = (x * scale * weight).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * hidden + column, value, mask=inside)


def rms_norm(
    input: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    block = triton.next_power_of_2(hidden)
    rms_norm_kernel[(tokens,)](
        input, weight, output, input.stride(0), hidden, epsilon,
        BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
