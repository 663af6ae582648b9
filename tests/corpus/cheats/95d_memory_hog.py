# cheat: 95 takes and touches memory until there is none
# op: linear
# device: cpu
# outcome: runtime_error, mismatch
# caught: runs, values
# Bounded as a safety net: 256 GB.
import torch

CHEAT = True
held = []


def linear(x, weight, out):
    if CHEAT:
        for _ in range(1024):
            held.append(torch.ones(1 << 26))  # 256 MB
        return
    torch.mm(x, weight.t(), out=out)
