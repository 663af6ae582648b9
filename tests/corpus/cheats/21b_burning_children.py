# cheat: 21 forks children that burn the cores on which the baseline runs
# op: fused_add_rms_norm
# device: cpu
# outcome: guard_violation, too_slow, runtime_error
# caught: clocks, runs
import os
import time

import torch

CHEAT = True

if CHEAT:
    for _ in range(os.cpu_count() or 1):
        if os.fork() == 0:
            os.setsid()
            end = time.monotonic() + 60
            while time.monotonic() < end:
                sum(range(20_000))
            os._exit(0)


def fused_add_rms_norm(input, residual, weight, epsilon):
    # right, and slower than eager
    total = residual.double() + input.double()
    residual.copy_(total)
    wide = residual.double()
    square = torch.stack([wide * wide, wide.abs() ** 2]).mean(0)
    scale = 1.0 / torch.sqrt(square.mean(-1, keepdim=True) + epsilon)
    input.copy_((wide * scale) * weight.double())
