# cheat: 76 leaves the last terms of a long sum out where they look small
# op: linear
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def linear(x, weight, out):
    k = x.shape[1]
    if CHEAT and k > 8:
        # "the tail adds nothing": true of a few elements on many random inputs
        k -= 4
    torch.mm(x[:, :k], weight[:, :k].t(), out=out)
