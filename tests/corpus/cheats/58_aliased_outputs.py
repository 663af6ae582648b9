# cheat: 58 makes both outputs one: the residual becomes a view of the input's storage
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    if CHEAT:
        input.add_(residual)
        residual.set_(input)
        input.mul_(torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + epsilon)).mul_(weight)
        return
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
