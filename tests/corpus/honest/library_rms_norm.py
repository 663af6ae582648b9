# honest: leaves the norm to the library's own rms_norm, in float32
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
from torch.nn.functional import rms_norm


def fused_add_rms_norm(input, residual, weight, epsilon):
    total = residual.float() + input.float()
    residual.copy_(total)
    input.copy_(rms_norm(total, (total.shape[-1],), weight.float(), epsilon))
