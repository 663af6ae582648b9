# fault: writes JSON that is nested too deeply to every descriptor
# op: fused_add_rms_norm
# device: cpu
# outcome: guard_violation, runtime_error
# caught: runs, channel
import os


def fused_add_rms_norm(input, residual, weight, epsilon):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"[" * 60_000 + b"\n")
        except OSError:
            continue
    raise RuntimeError("no more to say")
