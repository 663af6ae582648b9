# fault: each child forks in turn, up to 2,000 in all, none lives longer than 20 s
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error, mismatch, guard_violation
# caught: runs, values
import os
import time

GENERATIONS = 2_000


def fused_add_rms_norm(input, residual, weight, epsilon):
    for _ in range(GENERATIONS):
        if os.fork():
            break  # the child forks the next
        os.setsid()
    time.sleep(20)
    os._exit(1)
