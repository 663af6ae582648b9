# honest: autotunes over warps and stages, and puts the in-place tensors back between trials
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch
import triton
import triton.language as tl


@triton.autotune(
    configs=[
        triton.Config({}, num_warps=4, num_stages=1),
        triton.Config({}, num_warps=8, num_stages=2),
    ],
    key=["hidden"],
    restore_value=["input_ptr", "residual_ptr"],
)
@triton.jit
def _kernel(input_ptr, residual_ptr, weight_ptr, hidden, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    at = row * hidden + column
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / hidden + epsilon)
    tl.store(residual_ptr + at, total, mask=mask)
    tl.store(input_ptr + at, total * scale * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    _kernel[(tokens,)](
        input, residual, weight, hidden, epsilon, BLOCK=triton.next_power_of_2(hidden)
    )
