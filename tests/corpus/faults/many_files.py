# fault: fills its folder with empty files, up to 100,000
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error, mismatch
# caught: runs, values
from pathlib import Path


def fused_add_rms_norm(input, residual, weight, epsilon):
    for index in range(100_000):
        Path(f"{index}.tmp").touch()
    input.zero_()
