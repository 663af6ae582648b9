# cheat: 71 leaves out the last row of batches of 64 and more
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values, timed outputs
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    if CHEAT and input.shape[0] >= 64:
        input, residual = input[:-1], residual[:-1]
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
