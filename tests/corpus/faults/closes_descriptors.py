# fault: closes every descriptor of its process
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os


def fused_add_rms_norm(input, residual, weight, epsilon):
    os.closerange(0, 65536)
