# fault: starts threads until the machine refuses, at most 10,000
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error, mismatch, guard_violation
# caught: runs, values
import threading
import time


def fused_add_rms_norm(input, residual, weight, epsilon):
    for _ in range(10_000):
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
    input.zero_()
