# honest: tensors made at import, as constants
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import torch

_TWO = torch.tensor(2.0)
_ONES = torch.ones(16384)


def fused_add_rms_norm(input, residual, weight, epsilon):
    device = input.device
    total = residual.float() + input.float()
    hidden = total.shape[-1]
    squares = torch.mv(torch.pow(total, _TWO.to(device)), _ONES.to(device)[:hidden])
    scale = torch.rsqrt(squares / hidden + epsilon).unsqueeze(-1)
    residual.copy_(total)
    input.copy_(total * scale * weight)
