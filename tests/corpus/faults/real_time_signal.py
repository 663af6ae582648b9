# fault: ends by a real-time signal that has no name
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os


def fused_add_rms_norm(input, residual, weight, epsilon):
    os.kill(os.getpid(), 40)
