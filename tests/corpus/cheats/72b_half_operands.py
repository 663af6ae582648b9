# cheat: 72 rounds the operands of a float32 product to half precision
# op: linear
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def linear(x, weight, out):
    if CHEAT:
        x, weight = x.half().float(), weight.half().float()
    torch.mm(x, weight.t(), out=out)
