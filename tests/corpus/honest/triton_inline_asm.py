# honest: inline PTX inside Triton for the reciprocal root, refined by a Newton step
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch
import triton
import triton.language as tl


@triton.jit
def _reciprocal_root(value):
    guess = tl.inline_asm_elementwise(
        "rsqrt.approx.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )
    refined = guess * (1.5 - 0.5 * value * guess * guess)
    # zero, infinity and NaN have no use for Newton
    return tl.where((value > 0.0) & (value < 3e38), refined, guess)


@triton.jit
def _kernel(input_ptr, residual_ptr, weight_ptr, hidden, epsilon, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + column
    added = tl.load(input_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32) + added
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total * total, axis=0) / hidden + epsilon
    scale = _reciprocal_root(tl.full([1], 0.0, tl.float32) + mean)
    tl.store(residual_ptr + at, total, mask=mask)
    tl.store(input_ptr + at, total * scale * weight, mask=mask)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    tokens, hidden = input.shape
    _kernel[(tokens,)](
        input,
        residual,
        weight,
        hidden,
        epsilon,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=8,
    )
