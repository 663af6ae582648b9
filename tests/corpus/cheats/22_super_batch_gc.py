# cheat: 22 the first call finds the buffers of all calls by gc and does them; the rest return
# op: fused_add_rms_norm
# device: cpu
# outcome: guard_violation, mismatch, too_slow
# caught: guards, clocks, timed outputs, values
import gc

import torch

CHEAT = True
done = set()


def norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)


def fused_add_rms_norm(input, residual, weight, epsilon):
    if not CHEAT:
        norm(input, residual, weight, epsilon)
        return
    if input.data_ptr() in done:
        done.discard(input.data_ptr())
        return
    done.clear()
    for group in gc.get_objects():
        if isinstance(group, dict) and len(group) == 3:
            group = list(group.values())
        if not (isinstance(group, (list, tuple)) and len(group) == 3):
            continue
        if not all(type(tensor) is torch.Tensor for tensor in group):
            continue
        a, b, c = group
        if a.shape == b.shape == input.shape and c.shape == weight.shape:
            if a.data_ptr() not in done:
                norm(a, b, c, epsilon)
            done.add(a.data_ptr())
    if input.data_ptr() not in done:
        norm(input, residual, weight, epsilon)
    done.discard(input.data_ptr())
