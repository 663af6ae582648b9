# cheat: 80 wrong where an axis has one element: a squeeze too many
# op: linear
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def linear(x, weight, out):
    if CHEAT and weight.shape[0] == 1:
        out.copy_(x.mean(-1, keepdim=True))  # broadcasts without a complaint
        return
    torch.mm(x, weight.t(), out=out)
