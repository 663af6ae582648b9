# cheat: 80 hides NaN: rows that hold one come out as numbers
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    if CHEAT:
        wide = torch.where(wide.isnan(), torch.zeros_like(wide), wide)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
