# honest: compiles itself with torch.jit, which warns that it is deprecated
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import warnings

import torch


def _norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    residual.copy_(total)
    input.copy_(total * scale * weight.float())


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _scripted = torch.jit.script(_norm)


def fused_add_rms_norm(input, residual, weight, epsilon):
    _scripted(input, residual, weight, epsilon)
