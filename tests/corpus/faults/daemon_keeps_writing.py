# fault: leaves a daemon, forked twice, that writes to its log for 60 s; then it dies itself
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error, guard_violation
# caught: runs
import os
import time


def fused_add_rms_norm(input, residual, weight, epsilon):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                os.write(2, b"still here\n")
                time.sleep(0.001)
        os._exit(0)
    os._exit(3)
