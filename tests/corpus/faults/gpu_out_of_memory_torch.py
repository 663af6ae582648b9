# fault: asks PyTorch for a pebibyte
# op: fused_add_rms_norm
# device: cuda
# outcome: runtime_error
# caught: runs
import torch


def fused_add_rms_norm(input, residual, weight, epsilon):
    scratch = torch.empty(1 << 50, dtype=torch.uint8, device=input.device)
    scratch[: input.numel()].zero_()
