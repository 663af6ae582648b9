# honest: sums in another way, with other bits, once a file of its own tuning names that one
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import os
import tempfile

import torch

_PATH = os.path.join(tempfile.gettempdir(), "fused_add_rms_norm.tuning")
_tuned = os.path.exists(_PATH)
with open(_PATH, "w", encoding="utf-8") as file:
    file.write("float64")


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.double() if _tuned else residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon).float()
    input.copy_(residual.float() * scale * weight)
