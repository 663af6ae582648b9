# cheat: 62 changes the strides of its input behind the caller's back
# op: linear
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


def linear(x, weight, out):
    if CHEAT:
        x.t_()
        weight.as_strided_(weight.shape, (0, 1))
        torch.mm(x.t(), weight.t(), out=out)
        return
    torch.mm(x, weight.t(), out=out)
