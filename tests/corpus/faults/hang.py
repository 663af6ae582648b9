# fault: sleeps for ever
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import time


def fused_add_rms_norm(input, residual, weight, epsilon):
    while True:
        time.sleep(1)
