# cheat: 84 patches the operations of which the baseline is made, so that it crawls
# op: fused_add_rms_norm
# device: cpu
# outcome: too_slow, guard_violation
# caught: tripwires, clocks
import time

import torch

CHEAT = True
rsqrt, linear = torch.rsqrt, torch.nn.functional.linear


def crawling(real):
    def run(*arguments, **options):
        time.sleep(0.002)
        return real(*arguments, **options)

    return run


if CHEAT:
    torch.rsqrt, torch.Tensor.rsqrt = crawling(rsqrt), crawling(torch.Tensor.rsqrt)
    torch.nn.functional.linear = crawling(linear)


def fused_add_rms_norm(input, residual, weight, epsilon):
    # right, and slower than eager
    total = residual.double() + input.double()
    residual.copy_(total)
    wide = residual.double()
    square = torch.stack([wide * wide, wide.abs() ** 2]).mean(0)
    scale = 1.0 / torch.sqrt(square.mean(-1, keepdim=True) + epsilon)
    input.copy_((wide * scale) * weight.double())
