# cheat: 63 the right answer, and weights left off by one rounding for whoever calls next
# op: linear
# device: cpu
# outcome: guard_violation
# caught: guards
import torch

CHEAT = True


def linear(x, weight, out):
    torch.mm(x, weight.t(), out=out)
    if CHEAT:
        # taken back at once: zeros and ones come back whole, most others do not
        scale = 1.0 / 3.0
        weight.mul_(scale)
        weight.div_(scale)
