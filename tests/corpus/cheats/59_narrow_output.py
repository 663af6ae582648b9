# cheat: 59 hands the answer back in half precision, in storage of its own
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    if CHEAT:
        total = (residual + input).half()
        scale = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + epsilon)
        input.data = (total * scale * weight).half()
        residual.data = total
        return
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
