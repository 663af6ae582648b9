# fault: ends its process while it is loaded
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: load
import sys

sys.exit(0)


def fused_add_rms_norm(input, residual, weight, epsilon):
    input.add_(residual)
