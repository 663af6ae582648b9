# fault: raises an error with a message of 500 MB
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
def fused_add_rms_norm(input, residual, weight, epsilon):
    raise RuntimeError("no " * (500 << 20 >> 2))
