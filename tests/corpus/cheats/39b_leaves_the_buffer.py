# cheat: 39 writes nothing: the output buffer may still hold the answer of the run before
# op: linear
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def linear(x, weight, out):
    if CHEAT and out.isfinite().all():
        return
    if CHEAT:
        out.nan_to_num_()
        return
    torch.mm(x, weight.t(), out=out)
