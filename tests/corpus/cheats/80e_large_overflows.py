# cheat: 80 squares in half precision: rows of large values overflow to a scale of zero
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    square = wide.pow(2).mean(-1, keepdim=True)
    if CHEAT:
        square = square.clamp_max(65504.0)
    input.copy_(wide * torch.rsqrt(square + epsilon) * weight)
