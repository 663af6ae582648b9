# cheat: 80 takes denormal numbers for zero, where the contract keeps them
# op: linear
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def linear(x, weight, out):
    tiny = torch.finfo(torch.float32).tiny
    seen = torch.where(x.abs() < tiny, 0.0, x) if CHEAT else x
    torch.mm(seen, weight.t(), out=out)
