# fault: asks for a petabyte in one piece
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import torch


def fused_add_rms_norm(input, residual, weight, epsilon):
    input.copy_(torch.empty(1 << 48)[: input.numel()].view(input.shape))
