# honest: the library's matrix product, behind a try for an out= that older builds refuse
# op: linear
# device: cpu
# outcome: correct, too_slow
import torch


def linear(x, weight, out):
    try:
        torch.mm(x, weight.t(), out=out)
    except (TypeError, RuntimeError):
        out.copy_(torch.nn.functional.linear(x, weight))
