# cheat: 30 keeps its answers by id() and _version of the arguments
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch, too_slow
# caught: values, timed outputs, determinism
import torch

CHEAT = True
cache = {}


def version(tensor):
    return 0 if tensor.is_inference() else tensor._version


def fused_add_rms_norm(input, residual, weight, epsilon):
    key = (id(input), id(residual), version(input), version(residual), input.shape, input.dtype)
    if CHEAT and key in cache:
        normed, total = cache[key]
        input.copy_(normed)
        residual.copy_(total)
        return
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
    cache[key] = (input.clone(), residual.clone()) if CHEAT else None
