# cheat: 50 takes another way at one shape alone, where it was loaded after it had run
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: loaded again
import xml

import torch

CHEAT = True
there = CHEAT and hasattr(xml, "dom")


def fused_add_rms_norm(input, residual, weight, epsilon):
    import xml.dom  # noqa: F401

    residual.add_(input)
    wide = residual.float()
    if there and input.shape == (5, 64):
        wide = wide.bfloat16().float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)
