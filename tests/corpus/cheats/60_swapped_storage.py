# cheat: 60 ignores the buffers it was given and puts its own storage under the tensors
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    total = residual + input
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    normed = (wide * scale * weight).to(input.dtype)
    if CHEAT:
        input.set_(normed)
        residual.set_(total)
    else:
        input.copy_(normed)
        residual.copy_(total)
