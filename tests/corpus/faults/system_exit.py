# fault: raises SystemExit with a text
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
def fused_add_rms_norm(input, residual, weight, epsilon):
    raise SystemExit("all tests passed")
