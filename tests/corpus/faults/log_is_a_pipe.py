# fault: puts a pipe, which nobody writes to, in the place of its log
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os


def fused_add_rms_norm(input, residual, weight, epsilon):
    os.unlink("log")
    os.mkfifo("log")
    raise RuntimeError("see the log")
