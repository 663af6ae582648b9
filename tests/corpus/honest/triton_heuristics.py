# honest: heuristics choose the block, and an even width is a path of its own
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch
import triton
import triton.language as tl


@triton.heuristics(
    {
        "BLOCK": lambda args: triton.next_power_of_2(args["hidden"]),
        "EVEN": lambda args: triton.next_power_of_2(args["hidden"]) == args["hidden"],
    }
)
@triton.jit
def _kernel(
    input_ptr, residual_ptr, weight_ptr, hidden, epsilon, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * hidden + column
    if EVEN:
        added = tl.load(input_ptr + at).to(tl.float32)
        total = tl.load(residual_ptr + at).to(tl.float32) + added
        weight = tl.load(weight_ptr + column).to(tl.float32)
        root = tl.sqrt(tl.sum(total * total, axis=0) / hidden + epsilon)
        tl.store(residual_ptr + at, total)
        tl.store(input_ptr + at, total / root * weight)
    else:
        mask = column < hidden
        added = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32) + added
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        root = tl.sqrt(tl.sum(total * total, axis=0) / hidden + epsilon)
        tl.store(residual_ptr + at, total, mask=mask)
        tl.store(input_ptr + at, total / root * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    warps = 4 if hidden <= 4096 else 8
    _kernel[(tokens,)](input, residual, weight, hidden, epsilon, num_warps=warps)
