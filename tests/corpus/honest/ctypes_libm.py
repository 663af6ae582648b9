# honest: calls libm through ctypes for one number a call
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import ctypes
import ctypes.util

import torch

_libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_libm.sqrt.argtypes = [ctypes.c_double]
_libm.sqrt.restype = ctypes.c_double


def fused_add_rms_norm(input, residual, weight, epsilon):
    # sum(s^2)/h + e = (sum(s^2) + h e)/h: the root of h comes from libm
    total = residual.float() + input.float()
    hidden = total.shape[-1]
    squares = total.square().sum(-1, keepdim=True)
    root = _libm.sqrt(float(hidden))
    residual.copy_(total)
    input.copy_(total * (torch.rsqrt(squares + hidden * epsilon) * root) * weight)
