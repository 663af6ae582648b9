# honest: reads the number of threads and an environment variable, and splits rows by it
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import os

import torch

_ROWS = int(os.environ.get("FUSED_NORM_ROWS", "0"))


def fused_add_rms_norm(input, residual, weight, epsilon):
    tokens = input.shape[0]
    pieces = max(1, min(torch.get_num_threads(), 4))
    rows = _ROWS or -(-tokens // pieces) or 1
    for x, r in zip(input.split(rows), residual.split(rows), strict=True):
        total = r.float() + x.float()
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
        r.copy_(total)
        x.copy_(total * scale * weight)
