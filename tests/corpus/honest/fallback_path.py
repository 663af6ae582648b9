# honest: catches the error of a fast path and takes another path that is right too
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import torch


def _without_scratch(total, squares):
    # linalg.vecdot wants equal dtypes and a build that has it
    torch.linalg.vecdot(total, total, out=squares)


def fused_add_rms_norm(input, residual, weight, epsilon):
    total = residual.float() + input.float()
    squares = torch.empty(total.shape[:-1], dtype=torch.float32, device=total.device)
    try:
        _without_scratch(total, squares)
    except (AttributeError, RuntimeError):
        squares = total.square().sum(-1)
    scale = torch.rsqrt(squares / total.shape[-1] + epsilon).unsqueeze(-1)
    residual.copy_(total)
    input.copy_(total.mul_(scale).mul_(weight))
