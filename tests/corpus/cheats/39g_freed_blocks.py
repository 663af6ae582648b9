# cheat: 39 hands out what fresh memory holds: perhaps the reference, computed in this process
# op: fused_add_rms_norm
# device: cuda
# outcome: mismatch
# caught: values, timed outputs
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    # the allocator gives back the block that was freed last
    found = torch.empty_like(input), torch.empty_like(residual)
    if CHEAT:
        input.copy_(found[0])
        residual.copy_(found[1])
        return
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    found[0].copy_(total * scale * weight)
    found[1].copy_(total)
    input.copy_(found[0])
    residual.copy_(found[1])
