# cheat: 63 multiplies the weights into place and takes them back, off by one rounding
# op: linear
# device: cpu
# outcome: guard_violation
# caught: guards
import torch

CHEAT = True


def linear(x, weight, out):
    if CHEAT:
        scale = 1.0 / 3.0
        weight.mul_(scale)
        torch.mm(x, weight.t(), out=out)
        out.div_(scale)
        weight.div_(scale)
        return
    torch.mm(x, weight.t(), out=out)
