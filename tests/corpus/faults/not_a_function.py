# fault: the entry is replaced by a number once it is loaded
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: load, runs
def fused_add_rms_norm(input, residual, weight, epsilon):
    input.add_(residual)


globals()["fused_add_rms_norm"] = 42
