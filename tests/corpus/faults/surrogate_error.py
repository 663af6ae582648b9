# fault: raises an error whose text is no valid Unicode
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
def fused_add_rms_norm(input, residual, weight, epsilon):
    raise RuntimeError("half a pair: \ud800, a zero: \0, a bell: \a, red: \x1b[31m")
