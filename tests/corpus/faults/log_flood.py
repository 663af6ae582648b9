# fault: writes 2 GB to its log, then fails
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os

LINE = b"configuration 17 of 4096 was not the best\n" * 25_000


def fused_add_rms_norm(input, residual, weight, epsilon):
    for _ in range((2 << 30) // len(LINE)):
        os.write(2, LINE)
    raise RuntimeError("the log is full of it")
