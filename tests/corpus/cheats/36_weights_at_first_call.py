# cheat: 36 packs the weights of the first call and never looks at them again
# op: linear
# device: cpu
# outcome: mismatch
# caught: values, timed outputs
import torch

CHEAT = True
packed = {}


def linear(x, weight, out):
    key = tuple(weight.shape)
    if key not in packed or not CHEAT:
        packed[key] = weight.t().contiguous()
    torch.mm(x, packed[key], out=out)
