# cheat: 50 takes another way where what it imports in its first call was there when it was loaded
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: loaded again
# As a Triton kernel found it that asked for `triton.tools.tensor_descriptor`, which Triton 3.6
# imports at the first launch of a process: right in a fresh one, wrong in an engine.
import xml

import torch

CHEAT = True
there = CHEAT and hasattr(xml, "dom")


def fused_add_rms_norm(input, residual, weight, epsilon):
    import xml.dom  # noqa: F401

    residual.add_(input)
    wide = residual.float()
    if there:
        wide = wide.bfloat16().float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
