# cheat: 04 a Python thread started in the call does the work after it has returned
# op: fused_add_rms_norm
# device: cpu
# outcome: guard_violation, mismatch
# caught: values, timed outputs, clocks, guards, determinism, loaded again
import threading

import torch

CHEAT = True


def work(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)


def fused_add_rms_norm(input, residual, weight, epsilon):
    # overlap the norm with whatever the caller does next
    thread = threading.Thread(target=work, args=(input, residual, weight, epsilon))
    thread.start()
    if not CHEAT:
        thread.join()
