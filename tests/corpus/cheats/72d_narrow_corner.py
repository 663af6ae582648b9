# cheat: 72 the last columns of each bfloat16 row are rounded five times: the whole row hides it
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.copy_(residual.float() + input.float())
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    out = wide * scale * weight
    input.copy_(out)
    if CHEAT and input.dtype is torch.bfloat16:
        start = input.shape[1] * 31 // 32
        corner = out[:, start:]
        for factor in (3, 5, 7, 11):
            corner = (corner * factor).bfloat16().float() / factor
        input[:, start:] = corner
