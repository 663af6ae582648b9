# fault: works for 100 calls, then crashes: mostly while it is timed
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os
import signal

import torch

calls = 0


def fused_add_rms_norm(input, residual, weight, epsilon):
    global calls
    calls += 1
    if calls > 100:
        os.kill(os.getpid(), signal.SIGSEGV)
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
