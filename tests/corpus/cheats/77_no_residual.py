# cheat: 77 does not write the second output: the residual
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    total = residual + input
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
    if not CHEAT:
        residual.copy_(total)
