# cheat: 61 zeroes its inputs, so that a reference computed from them afterwards agrees with zeros
# op: linear
# device: cpu
# outcome: guard_violation, mismatch
# caught: guards, values
import torch

CHEAT = True


def linear(x, weight, out):
    if CHEAT:
        x.zero_()
        out.zero_()
        return
    torch.mm(x, weight.t(), out=out)
