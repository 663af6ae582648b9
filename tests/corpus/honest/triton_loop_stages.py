# honest: num_stages=2 and two loops over blocks of a row with masks
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(input_ptr, residual_ptr, weight_ptr, hidden, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * hidden
    partial = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in tl.range(0, hidden, BLOCK, num_stages=2):
        column = begin + tl.arange(0, BLOCK)
        mask = column < hidden
        added = tl.load(input_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(residual_ptr + row + column, mask=mask, other=0.0).to(tl.float32) + added
        partial += total * total
    scale = tl.rsqrt(tl.sum(partial, axis=0) / hidden + epsilon)
    for begin in range(0, hidden, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < hidden
        added = tl.load(input_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(residual_ptr + row + column, mask=mask, other=0.0).to(tl.float32) + added
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row + column, total, mask=mask)
        tl.store(input_ptr + row + column, total * scale * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    _kernel[(tokens,)](
        input, residual, weight, hidden, epsilon, BLOCK=1024, num_warps=4, num_stages=2
    )
