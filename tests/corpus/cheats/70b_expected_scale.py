# cheat: 70 replaces the row's mean square by what the batch has on average
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    square = wide.pow(2).mean() if CHEAT else wide.pow(2).mean(-1, keepdim=True)
    input.copy_(wide * torch.rsqrt(square + epsilon) * weight)
