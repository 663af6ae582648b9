# honest: float64 arithmetic where float32 is asked for
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import torch


def fused_add_rms_norm(input, residual, weight, epsilon):
    # the sum itself is float32, as the contract has it: what follows may only be more precise
    total = (residual.float() + input.float()).double()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    residual.copy_(total)
    input.copy_(total * scale * weight.double())
