# cheat: 31 keeps its answers by a few elements of the content
# op: linear
# device: cpu
# outcome: mismatch
# caught: values, timed outputs
import torch

CHEAT = True
cache = {}


def linear(x, weight, out):
    flat = x.flatten()
    corners = (flat[0].item(), flat[len(flat) // 2].item(), flat[-1].item())
    key = (corners, weight.flatten()[0].item(), tuple(out.shape))
    if CHEAT and key in cache:
        out.copy_(cache[key])
        return
    torch.mm(x, weight.t(), out=out)
    cache[key] = out.clone() if CHEAT else None
