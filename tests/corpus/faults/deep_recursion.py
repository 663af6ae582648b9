# fault: recurses in Python with the limit taken off
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import sys


def deeper(depth):
    return deeper(depth + 1) + 1


def fused_add_rms_norm(input, residual, weight, epsilon):
    sys.setrecursionlimit(1 << 30)
    deeper(0)
