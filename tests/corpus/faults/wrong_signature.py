# fault: takes another number of arguments than the contract says
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
def fused_add_rms_norm(input, residual):
    input.add_(residual)
