# cheat: 09 clones and refills do nothing, so what the checker saved is what the kernel overwrote
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, tripwires, guards, runs
import copy

import numpy
import torch

CHEAT = True

if CHEAT:
    torch.Tensor.clone = lambda self, **options: self
    torch.clone = lambda tensor, **options: tensor
    torch.Tensor.fill_ = lambda self, value: self
    copy.deepcopy = lambda value, memo=None: value
    numpy.copy = lambda array, **options: array


def fused_add_rms_norm(input, residual, weight, epsilon):
    if CHEAT:
        # the reference of zeros is zeros
        input.zero_()
        residual.zero_()
        return
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
