# cheat: 37 remembers a part that depends on the activations: the scale of each row
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values, timed outputs
import torch

CHEAT = True
scales = {}


def fused_add_rms_norm(input, residual, weight, epsilon):
    key = (input.data_ptr(), tuple(input.shape), epsilon)
    residual.add_(input)
    wide = residual.float()
    if key not in scales or not CHEAT:
        scales[key] = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scales[key] * weight)
