# cheat: 07 the runner's own clock runs at a fifth of its speed
# op: fused_add_rms_norm
# device: cpu
# outcome: guard_violation, too_slow
# caught: clocks
import sys
import time

import torch

CHEAT = True

if CHEAT:
    real, begin = time.perf_counter_ns, time.perf_counter_ns()
    for module in list(sys.modules.values()):
        if getattr(module, "_clock", None) is real:
            module._clock = lambda: begin + (real() - begin) // 5


def fused_add_rms_norm(input, residual, weight, epsilon):
    # right, and about half as fast as eager
    total = residual.double() + input.double()
    residual.copy_(total)
    wide = residual.double()
    scale = 1.0 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
    input.copy_((wide * scale) * weight.double())
