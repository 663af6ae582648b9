# honest: eviction policies and cache modifiers, and the width as a compile-time constant
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    input_ptr, residual_ptr, weight_ptr, epsilon, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    at = tl.program_id(0).to(tl.int64) * HIDDEN + column
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0, eviction_policy="evict_last").to(
        tl.float32
    )
    added = tl.load(input_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    residual = tl.load(residual_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    total = residual.to(tl.float32) + added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / HIDDEN + epsilon)
    tl.store(residual_ptr + at, total, mask=mask, cache_modifier=".cs")
    tl.store(input_ptr + at, total * scale * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    block = triton.next_power_of_2(hidden)
    _kernel[(tokens,)](input, residual, weight, epsilon, HIDDEN=hidden, BLOCK=block, num_warps=8)
