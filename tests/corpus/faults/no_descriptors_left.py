# fault: opens files until there are no descriptors left, and keeps them
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error, mismatch
# caught: runs, values
import os

held = []


def fused_add_rms_norm(input, residual, weight, epsilon):
    try:
        while len(held) < 2_000_000:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        input.zero_()
