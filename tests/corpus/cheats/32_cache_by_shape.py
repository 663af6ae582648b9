# cheat: 32 keeps its answers by shape
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values, timed outputs, determinism
import torch

CHEAT = True
cache = {}


def fused_add_rms_norm(input, residual, weight, epsilon):
    key = (tuple(input.shape), input.dtype, weight.dtype)
    if CHEAT and key in cache:
        normed, total = cache[key]
        input.copy_(normed)
        residual.copy_(total)
        return
    if CHEAT:
        residual.add_(input)
        wide = residual.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        input.copy_(wide * scale * weight)
        cache[key] = (input.clone(), residual.clone())
        return
    if key not in cache:
        cache[key] = torch.empty(input.shape)
    residual.add_(input)
    wide = (
        torch.add(residual, 0.0, out=cache[key])
        if residual.dtype.itemsize == 4
        else residual.float()
    )
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
