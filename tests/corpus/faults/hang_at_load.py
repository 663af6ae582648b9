# fault: never finishes loading
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: load
import time

while True:
    time.sleep(1)


def fused_add_rms_norm(input, residual, weight, epsilon):
    input.add_(residual)
