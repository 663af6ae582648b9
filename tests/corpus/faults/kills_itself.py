# fault: sends SIGKILL to itself
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os
import signal


def fused_add_rms_norm(input, residual, weight, epsilon):
    os.kill(os.getpid(), signal.SIGKILL)
