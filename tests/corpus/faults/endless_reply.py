# fault: writes to every pipe without ever ending the line, up to 1 GB
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os
import stat


def fused_add_rms_norm(input, residual, weight, epsilon):
    pipes = [fd for fd in range(1, 256) if is_pipe(fd)]
    for _ in range(1024):
        for descriptor in pipes:
            os.write(descriptor, b"x" * (1 << 20))
    raise RuntimeError("still no line")


def is_pipe(descriptor):
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
