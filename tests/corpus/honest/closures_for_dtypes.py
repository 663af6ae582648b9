# honest: makes its own functions at run time, by closures and a table of dtypes
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import torch


def _make(exact):
    if exact:

        def norm(input, residual, weight, epsilon):
            residual.add_(input)
            mean = torch.linalg.vecdot(residual, residual) / residual.shape[-1]
            torch.mul(residual, torch.rsqrt(mean + epsilon).unsqueeze(-1), out=input)
            input.mul_(weight)

    else:

        def norm(input, residual, weight, epsilon):
            total = residual.float() + input.float()
            mean = torch.linalg.vecdot(total, total) / total.shape[-1]
            residual.copy_(total)
            input.copy_(total * torch.rsqrt(mean + epsilon).unsqueeze(-1) * weight)

    norm.__name__ = f"norm_{'in_place' if exact else 'through_float32'}"
    return norm


_BY_DTYPE = {dtype: _make(dtype is torch.float32) for dtype in (torch.float32, torch.bfloat16)}


def fused_add_rms_norm(input, residual, weight, epsilon):
    _BY_DTYPE.get(input.dtype, _BY_DTYPE[torch.bfloat16])(input, residual, weight, epsilon)
