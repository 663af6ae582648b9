# fault: leaves folders that are nested 3000 deep
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
import os


def fused_add_rms_norm(input, residual, weight, epsilon):
    here = os.getcwd()
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    raise RuntimeError("no more to say")
