# cheat: 69 takes it that the gain is one wherever it is close to one
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if CHEAT:
        weight = torch.where((weight - 1.0).abs() < 0.01, torch.ones_like(weight), weight)
    input.copy_(wide * scale * weight)
