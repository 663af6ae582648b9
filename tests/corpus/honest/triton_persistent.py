# honest: as many programs as processors, cached per device; each walks over rows
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import functools

import torch
import triton
import triton.language as tl


@functools.lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _kernel(input_ptr, residual_ptr, weight_ptr, tokens, hidden, epsilon, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = row.to(tl.int64) * hidden + column
        added = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32) + added
        scale = tl.rsqrt(tl.sum(total * total, axis=0) / hidden + epsilon)
        tl.store(residual_ptr + at, total, mask=mask)
        tl.store(input_ptr + at, total * scale * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    grid = (min(tokens, 2 * _processors(input.device)),)
    block = triton.next_power_of_2(hidden)
    _kernel[grid](input, residual, weight, tokens, hidden, epsilon, BLOCK=block, num_warps=8)
