# fault: indexes out of range, which PyTorch's kernel asserts on the device
# op: fused_add_rms_norm
# device: cuda
# outcome: runtime_error
# caught: runs
import torch


def fused_add_rms_norm(input, residual, weight, epsilon):
    index = torch.full((1,), weight.shape[0] + 1, dtype=torch.int64, device=weight.device)
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    residual.copy_(total)
    input.copy_(total * scale * weight[index])
