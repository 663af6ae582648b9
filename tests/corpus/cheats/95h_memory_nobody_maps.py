# cheat: 95 fills files in memory that no process maps, up to 8 GB, where none counts them
# op: linear
# device: cpu
# outcome: runtime_error
# caught: runs
# Bounded as a safety net. It is right where it gets all of it.
import os

import torch

CHEAT = True
SIZE = 256 << 20
held = []


def hoard():
    while len(held) < 32:
        held.append(os.memfd_create("scratch"))
        os.posix_fallocate(held[-1], 0, SIZE)


def linear(x, weight, out):
    if CHEAT:
        hoard()
    torch.mm(x, weight.t(), out=out)
