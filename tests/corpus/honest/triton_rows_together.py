# honest: several rows a program, as a two-dimensional block
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    input_ptr,
    residual_ptr,
    weight_ptr,
    tokens,
    hidden,
    epsilon,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < tokens) & (column < hidden)
    at = row.to(tl.int64) * hidden + column
    added = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32) + added
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    mean = tl.sum(total * total, axis=1) / hidden
    scale = tl.rsqrt(mean + epsilon)[:, None]
    tl.store(residual_ptr + at, total, mask=mask)
    tl.store(input_ptr + at, total * scale * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    block = triton.next_power_of_2(hidden)
    rows = max(1, min(8, 4096 // block))
    _kernel[(triton.cdiv(tokens, rows),)](
        input, residual, weight, tokens, hidden, epsilon, ROWS=rows, BLOCK=block, num_warps=8
    )
