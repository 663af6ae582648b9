# fault: raises KeyboardInterrupt, as if a person had stopped the judge
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
def fused_add_rms_norm(input, residual, weight, epsilon):
    raise KeyboardInterrupt
