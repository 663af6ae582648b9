# honest: times two variants with time.perf_counter at the first call of a shape
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import time

import torch


def _mean(total):
    return total.square().mean(-1, keepdim=True)


def _vector_norm(total):
    return torch.linalg.vector_norm(total, dim=-1, keepdim=True).square_().div_(total.shape[-1])


_fastest = {}


def _benchmark(total):
    elapsed = {}
    for variant in (_mean, _vector_norm):
        begin = time.perf_counter()
        for _ in range(5):
            variant(total)
        elapsed[variant] = time.perf_counter() - begin
    return min(elapsed, key=elapsed.get)


def fused_add_rms_norm(input, residual, weight, epsilon):
    total = residual.float() + input.float()
    key = (tuple(total.shape), total.device)
    if key not in _fastest:
        _fastest[key] = _benchmark(total)
    scale = torch.rsqrt(_fastest[key](total) + epsilon)
    residual.copy_(total)
    input.copy_(total.mul_(scale).mul_(weight))
