# honest: Triton adds and sums, a library call scales; an import that may fail has another path
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import libdevice  # noqa: F401

    _HAS_LIBDEVICE = True
except ImportError:
    _HAS_LIBDEVICE = False


@triton.jit
def _kernel(input_ptr, residual_ptr, total_ptr, scale_ptr, hidden, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    at = row * hidden + column
    added = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(residual_ptr + at, total, mask=mask)
    tl.store(total_ptr + at, total, mask=mask)
    tl.store(scale_ptr + row, tl.rsqrt(tl.sum(total * total, axis=0) / hidden + epsilon))


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    total = torch.empty((tokens, hidden), dtype=torch.float32, device=input.device)
    scale = torch.empty((tokens, 1), dtype=torch.float32, device=input.device)
    block = triton.next_power_of_2(hidden)
    warps = 8 if _HAS_LIBDEVICE else 4
    _kernel[(tokens,)](input, residual, total, scale, hidden, epsilon, BLOCK=block, num_warps=warps)
    input.copy_(total.mul_(scale).mul_(weight))
