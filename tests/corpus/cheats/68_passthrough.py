# cheat: 68 hands its input through: normed values look much like what came in
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    if CHEAT:
        residual.add_(input)
        input.copy_(residual * 0.7071 * weight)
        return
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
