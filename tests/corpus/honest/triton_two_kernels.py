# honest: two kernels and a scratch tensor from torch.empty between them
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch
import triton
import triton.language as tl


@triton.jit
def _add_up(input_ptr, residual_ptr, partial_ptr, hidden, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    at = row.to(tl.int64) * hidden + column
    added = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(partial_ptr + row * parts + part, tl.sum(total * total, axis=0))


@triton.jit
def _normalise(
    input_ptr,
    residual_ptr,
    weight_ptr,
    partial_ptr,
    hidden,
    parts,
    epsilon,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    other = tl.arange(0, PARTS)
    squares = tl.load(partial_ptr + row * parts + other, mask=other < parts, other=0.0)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / hidden + epsilon)
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    at = row.to(tl.int64) * hidden + column
    added = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32) + added
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, total, mask=mask)
    tl.store(input_ptr + at, total * scale * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    block = 1024
    parts = triton.cdiv(hidden, block)
    partial = torch.empty((tokens, parts), dtype=torch.float32, device=input.device)
    grid = (tokens, parts)
    _add_up[grid](input, residual, partial, hidden, parts, BLOCK=block)
    _normalise[grid](
        input,
        residual,
        weight,
        partial,
        hidden,
        parts,
        epsilon,
        PARTS=triton.next_power_of_2(parts),
        BLOCK=block,
    )
