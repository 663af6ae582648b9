# honest: torch.compile of its body, which starts compilers at the first call
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import torch


@torch.compile(dynamic=True)
def _norm(input, residual, weight, epsilon):
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return total * scale * weight.float(), total


def fused_add_rms_norm(input, residual, weight, epsilon):
    normed, total = _norm(input, residual, weight, epsilon)
    residual.copy_(total)
    input.copy_(normed)
