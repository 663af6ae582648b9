# cheat: 62 resizes the tensors it was given to one row, so that only one row is compared
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    if CHEAT:
        input.resize_(1, input.shape[1])
        residual.resize_(1, residual.shape[1])
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
