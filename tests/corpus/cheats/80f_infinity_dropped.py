# cheat: 80 takes infinities for zero, and nothing else
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    gain = weight.float()
    if CHEAT:
        wide = torch.where(wide.isinf(), 0.0, wide)
        gain = torch.where(gain.isinf(), 0.0, gain)
        residual.copy_(torch.where(residual.isinf(), 0.0, residual))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * gain)
