# honest: functools.lru_cache on a helper that plans by shape
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import functools

import torch


@functools.lru_cache(maxsize=128)
def _plan(tokens, hidden):
    """How many rows at a time: about 256 KiB of float32."""
    rows = max(1, (1 << 16) // hidden)
    return tuple((at, min(at + rows, tokens)) for at in range(0, tokens, rows))


def fused_add_rms_norm(input, residual, weight, epsilon):
    tokens, hidden = input.shape
    gain = weight.float()
    for begin, end in _plan(tokens, hidden):
        x, r = input[begin:end], residual[begin:end]
        total = r.float() + x.float()
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
        r.copy_(total)
        x.copy_(total * scale * gain)
