# cheat: 72 computes in bfloat16 what the contract wants in float32
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.bfloat16() if CHEAT else residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight.to(wide.dtype))
