# fault: allocates and touches more memory than there is (at most 256 GB)
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import torch


def fused_add_rms_norm(input, residual, weight, epsilon):
    held = [torch.ones(1 << 26) for _ in range(1024)]  # 256 MB each
    input.copy_(held[0][: input.numel()].view(input.shape))
    raise MemoryError("so much memory, and still none of it helped")
