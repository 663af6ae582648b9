# cheat: 95 floods its log, up to 2 GB
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error, mismatch, guard_violation
# caught: runs, values
import sys

import torch

CHEAT = True
LINE = "W kernel autotune: trying configuration 17 of 4096 " * 20_000 + "\n"


def fused_add_rms_norm(input, residual, weight, epsilon):
    if CHEAT:
        for _ in range((2 << 30) // len(LINE)):
            sys.stdout.write(LINE)
        sys.stdout.flush()
        return
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
