# cheat: 20 sleeps at first so that few samples are taken, then works at every 16th call
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values, timed outputs, determinism, clocks
import time

import torch

CHEAT = True
calls = 0


def fused_add_rms_norm(input, residual, weight, epsilon):
    global calls
    calls += 1
    if CHEAT and calls <= 12:
        time.sleep(0.05)  # "3 samples will have to do", says an adaptive timer
    elif CHEAT and calls % 16:
        return
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
